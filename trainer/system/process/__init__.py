"""Process management: signals, forked and local workers, long operations, nvidia-smi."""
