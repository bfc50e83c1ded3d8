"""The budget and the spending of runs."""
