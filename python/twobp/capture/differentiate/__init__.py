"""A layer becomes a graph of its forward and backward pass, which is split into F, I and W."""
