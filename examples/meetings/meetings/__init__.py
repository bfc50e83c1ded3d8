"""Meeting transcripts with their minutes: a deterministic generator and a converter."""
