"""Reaching hosts: this machine, agents over SSH, many at once."""
