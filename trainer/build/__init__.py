"""Where a run's inputs are read and become objects: the composition root."""
