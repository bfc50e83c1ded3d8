"""The coordinator's state machine. Sans-IO."""
