"""Pipeline training of torch modules with a backward pass in two stages."""
