"""Facts about the machine a process runs on: devices, load, network. Standard library only."""
