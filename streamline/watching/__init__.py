"""Who watches a plan that runs and tells of it: a display, a trace, warnings in the log."""
