"""Machines on the network: found, asked, and written as an inventory."""
