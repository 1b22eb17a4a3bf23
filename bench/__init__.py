"""Benchmarks: one question per file, cases side by side in one run, as ratios to a floor or a peer."""
