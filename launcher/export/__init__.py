"""A run as the files of another system: torchrun, Slurm, SkyPilot or Kubernetes, and its return."""
