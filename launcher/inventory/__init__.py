"""Hosts from an Ansible inventory."""
