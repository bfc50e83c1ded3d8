"""Hosts: what an Ansible inventory says of them; `facts`: what a machine says of itself."""
