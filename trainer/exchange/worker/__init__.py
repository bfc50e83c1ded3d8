"""A worker's side of the exchange."""
