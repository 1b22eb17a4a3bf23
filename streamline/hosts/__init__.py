"""Hosts: threads and processes, each with an event loop of its own in which workers run, and their two ends."""
