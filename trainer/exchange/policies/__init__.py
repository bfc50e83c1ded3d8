"""Step policies: when the members of a run exchange, what they send, and how it is applied."""
