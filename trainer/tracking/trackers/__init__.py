"""Where a run's figures go besides `metrics.jsonl`."""
