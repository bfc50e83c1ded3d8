"""Copy Motley itself, models, data and checkpoints between this machine and the hosts."""
