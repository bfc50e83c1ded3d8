"""The bytes and messages between workers and coordinator. Sans-IO."""
