"""Hosts, which run workers: both sides of the protocol, supervision, restarts."""
