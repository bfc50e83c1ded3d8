"""The cost of a run while it runs, and the guard that stops it."""
