"""A teacher scores a corpus."""
