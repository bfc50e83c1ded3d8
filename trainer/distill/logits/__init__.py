"""Teacher logits on disk: sharded Parquet that a student may read while it grows."""
