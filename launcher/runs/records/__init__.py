"""The records of a run: its plan, config, settings, and reports."""
