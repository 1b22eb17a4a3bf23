"""Devices, and what moves batches there."""
