"""One file a command of `trainer`: parse, call, print."""
