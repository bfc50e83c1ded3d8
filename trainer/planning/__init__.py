"""Plan a run before it starts: settings, memory, time, cost; and its budget. Torch-free."""
