"""A model's own continuations of prompts on disk: sharded Parquet that is data, too."""
