"""What the command lines of both programs share."""
