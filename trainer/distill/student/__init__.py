"""A student trains on a teacher's scores."""
