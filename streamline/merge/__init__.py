"""From several workers to one stream: in strict order, or best effort."""
