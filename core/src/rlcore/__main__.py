"""Runs the command line as `python -m rlcore`."""

from rlcore.cli.main import main

if __name__ == "__main__":
    main()
