"""Whether a snapshot fits a plan, what may differ, and what a resume does."""
