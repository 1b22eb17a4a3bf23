"""Where items come from. A source is opened one shard at a time, at a state or at the beginning."""
