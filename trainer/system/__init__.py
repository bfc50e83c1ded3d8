"""What both programs use of the operating system: exit codes, processes, files, the terminal."""
