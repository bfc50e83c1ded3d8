"""What a run will be: hosts, ranks, devices, commands. Pure."""
