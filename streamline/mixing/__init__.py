"""Sources that are made of several pipelines."""
