"""A run's life: registry, up, join, status, down."""
