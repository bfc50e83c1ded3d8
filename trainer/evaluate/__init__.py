"""Scoring a model on held-out data."""
