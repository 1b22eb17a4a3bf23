"""What trainers hold: loaders, replicators, datasets, and the integrations of trainers."""
