"""Real hosts on one machine: a lab of booted Debian systems in namespaces of its own.

`python -m tests.testbed --help`, or `Lab` from a test. README.md says how it is made.
"""
