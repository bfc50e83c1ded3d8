"""Sockets, TLS and threads around the exchange."""
