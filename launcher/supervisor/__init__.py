"""The process supervisor: starts, restarts and logs one process. Standard library only."""
