"""Export a run to torchrun, Slurm, SkyPilot or Kubernetes, and import its result."""
