"""The module becomes one graph, from the fields of a micro-batch to the loss."""
