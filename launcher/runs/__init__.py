"""A run's life: preflight, up, join, status, down."""
