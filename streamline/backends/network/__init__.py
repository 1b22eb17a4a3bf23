"""Connections between machines: both ends prove that they know a common key; TLS encrypts them."""
