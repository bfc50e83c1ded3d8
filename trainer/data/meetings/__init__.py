"""Meeting transcripts with their minutes: a deterministic generator and converters."""
