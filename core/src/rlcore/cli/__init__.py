"""The command line: `rlcore train`, `eval`, `check`, `status`, `config`, `plugins`, `version`."""
