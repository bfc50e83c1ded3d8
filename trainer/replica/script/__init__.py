"""A run's model, data and loss as a script of the operator's: any PyTorch module."""
