"""The shared parts of both programs' command lines."""
