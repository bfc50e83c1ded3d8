"""Experiments with measured figures: one technique each, or ways to sum gradients compared."""
