"""From JSON Lines on disk to the token batches that a replica reads."""
