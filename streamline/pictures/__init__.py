"""Plans for people: in words, as diagrams. Nothing runs."""
