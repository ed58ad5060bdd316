"""Views of runs: the live display, the report at the end, curves, samples, states, timelines, and one HTML page."""
