"""Frozen weights that are read from their files while a model computes."""
