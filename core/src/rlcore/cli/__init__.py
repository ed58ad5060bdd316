"""The command line: `rlcore train`, `check`, `config`, `plugins`, `eval`, `version`."""
