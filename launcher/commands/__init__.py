"""The command groups of `launch`: parse, call, print."""
