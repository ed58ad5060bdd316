"""Reports on a run for its user: progress, times, metrics, sinks."""
