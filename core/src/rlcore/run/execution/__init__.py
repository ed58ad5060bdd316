"""The execution of a run: backends in this process, what other executions build theirs with, refits and residency."""
