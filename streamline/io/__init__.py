"""Bytes: where they are stored, how they are read ahead, and the formats that make items of them."""
