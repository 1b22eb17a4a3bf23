"""What is counted while a stream runs, as users see it: stats, the verdict, progress, the watchdog, traces, metrics."""
