"""Passes over vectors in C; without a compiler, NumPy computes the same in more of them."""
