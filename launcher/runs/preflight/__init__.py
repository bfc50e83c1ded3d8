"""The operator's half of the checks before a run: asks hosts and compares."""
