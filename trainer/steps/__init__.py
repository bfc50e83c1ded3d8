"""A training step from a worker's side."""
