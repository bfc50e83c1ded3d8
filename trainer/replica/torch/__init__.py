"""The replica that PyTorch computes."""
