"""Durable files: atomic folders, JSON lines, leases."""
