"""What is counted while a plan runs, and what users see of it."""
