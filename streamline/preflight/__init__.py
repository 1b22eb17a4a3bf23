"""What can be known of a run before it: what it would read, and what it would fail on."""
