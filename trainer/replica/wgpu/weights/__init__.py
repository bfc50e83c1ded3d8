"""Transfer of frozen and trainable weights to the device."""
