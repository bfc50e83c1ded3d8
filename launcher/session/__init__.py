"""The supervisor of one process: starts, restarts and logs it. Standard library only."""
