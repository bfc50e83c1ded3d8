"""One step of a fine-tune, from a config file to a checkpoint, on any backend."""
