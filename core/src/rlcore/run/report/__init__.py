"""What a run tells its user while it goes on and when it ends: progress, times, metrics, curves."""
