"""The idea and what moves it: flows, states, channels, tasks, counters, errors that are skipped. Knows no stage."""
