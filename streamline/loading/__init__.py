"""What trainers hold: a loader, iterated again and again, an epoch each time."""
