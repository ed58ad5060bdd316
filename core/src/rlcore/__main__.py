"""The entry point of the `rlcore` script and of `python -m rlcore`. It handles Ctrl-C while modules are still imported, too."""

import sys

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 plus the number of SIGINT."""


def main() -> None:
    """Import and run the command line. Report Ctrl-C outside of a command; a command reports its own errors."""
    try:
        from rlcore.cli.main import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
