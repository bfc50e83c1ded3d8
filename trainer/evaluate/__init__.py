"""The eval runner: scores the checkpoints of a run while it trains."""
