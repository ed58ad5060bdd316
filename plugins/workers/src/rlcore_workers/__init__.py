"""Worker processes, the end of process trees, functions that a user names, and sinks that write in a thread."""
