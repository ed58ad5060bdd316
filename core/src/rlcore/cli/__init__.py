"""The command line: `rlcore train`, `eval`, `check`, `config`, `plugins`, `version`."""
