"""Tools for tests: fakes of every role."""
