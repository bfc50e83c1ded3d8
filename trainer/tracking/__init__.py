"""What a run reports: metrics, status, progress."""
