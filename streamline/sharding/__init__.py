"""Which items are whose: shards, index permutations, ranks, and how ranks end together."""
