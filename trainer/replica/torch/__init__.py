"""The PyTorch replica."""
