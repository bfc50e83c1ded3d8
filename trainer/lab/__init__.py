"""Small experiments that show one technique each with its real figures, offline, in seconds."""
