"""A training run: its inputs, how they become objects, and the loops of its processes."""
