"""Items on which user code fails: left out, counted, written down, tried again."""
