"""Asking machines what they have; those on the network, written as an inventory."""
