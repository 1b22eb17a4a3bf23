"""The bytes of many files, read ahead under one budget."""
