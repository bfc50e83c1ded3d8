"""Experiments with measured figures: single techniques, and ways to sum gradients compared."""
