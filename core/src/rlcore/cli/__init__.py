"""The command line: `rlcore train`, `eval`, `check`, `config`, and the commands that packages add."""
