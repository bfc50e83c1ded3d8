"""Exit codes, processes, files and the terminal, for both programs."""
