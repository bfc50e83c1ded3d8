"""What is kept of a run: its plan, config, settings, and reports."""
