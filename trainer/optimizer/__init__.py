"""Updates of the weights, with the same bits on every machine."""
