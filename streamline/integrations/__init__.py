"""Trainers that hold a loader in their own way. Each module needs the library that it is called after."""
