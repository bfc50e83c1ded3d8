"""What the command lines of both programs are made of."""
