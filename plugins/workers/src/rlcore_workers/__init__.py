"""Worker processes, the end of process trees, and functions that a user names."""
