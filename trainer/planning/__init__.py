"""What a run needs before it starts: memory, time and cost, as pure functions without torch."""
