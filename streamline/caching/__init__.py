"""Stages that keep what they draw: one pass, or cycle by cycle; in memory, and in files."""
