"""Hosts, as described by an Ansible inventory; `facts`: what a machine reports about itself."""
