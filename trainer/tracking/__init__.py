"""Reports of a run: metrics, status, progress."""
