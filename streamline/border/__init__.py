"""What crosses the border between a running and the hosts of its workers: messages, items, states, failures."""
