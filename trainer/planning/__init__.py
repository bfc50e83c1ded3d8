"""What a run needs before it starts: settings, memory, time, cost; and its budget. Torch-free."""
