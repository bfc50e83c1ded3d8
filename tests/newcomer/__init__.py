"""Mistakes that people make in their first hour, and what comes of each.

`python -m tests.newcomer` makes them and prints a table: exit code, processor seconds, message.
"""
