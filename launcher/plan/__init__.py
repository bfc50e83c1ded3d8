"""The plan of a run: hosts, ranks, devices, commands. Pure."""
