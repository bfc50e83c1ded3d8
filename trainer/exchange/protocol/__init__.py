"""What travels between workers and coordinator, as bytes and messages. Sans-IO."""
