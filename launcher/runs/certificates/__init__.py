"""Certificates of a run: its authority, and the files each host gets."""
