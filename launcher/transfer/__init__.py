"""Models and data onto hosts by rsync."""
