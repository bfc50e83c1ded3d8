"""Models in llama.cpp's format, GGUF: read once and kept as a model folder in the cache."""
