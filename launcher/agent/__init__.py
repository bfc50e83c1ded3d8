"""The agent of a host: its operations, and the host's half of the checks before a run."""
