"""`Snapshot`, its file, and whether it fits a plan."""
