"""The host's half of the checks before a run."""
