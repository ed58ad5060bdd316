"""Tools for tests: fakes of every role, small model directories, and launched ranks."""
