"""Text generation with cached keys and values."""
