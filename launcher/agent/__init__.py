"""The agent of a host: what it answers, and the host's half of the checks before a run."""
