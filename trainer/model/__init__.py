"""Facts of a model without its weights: files, architecture, parameter layout, memory."""
