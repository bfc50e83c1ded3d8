"""Model copies that can run forward and backward, one module a backend."""
