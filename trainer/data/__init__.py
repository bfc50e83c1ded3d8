"""JSON Lines on disk become the token batches that a replica reads."""
