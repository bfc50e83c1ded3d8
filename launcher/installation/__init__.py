"""Motley's installation on a host: versions, environments. Standard library only."""
