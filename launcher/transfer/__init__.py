"""Between this machine and the hosts: Motley itself, models, data, checkpoints."""
