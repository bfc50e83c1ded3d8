"""Faults without pause against one run of real processes, and what is left of it afterwards.

`python -m tests.soak --minutes 60 --seed 7`, or `make soak`; README.md says how to read it.
"""
