"""The layers of a decoder, forward and backward."""
