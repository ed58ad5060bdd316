"""What the `rlcore` script and `python -m rlcore` run: Ctrl-C ends it in the same way while modules are still imported."""

import sys

INTERRUPTED = 130
"""Exit code of Ctrl-C, as shells have it."""


def main() -> None:
    """Run the command line, which is imported here. Ctrl-C outside of a command, whose own errors it reports, is told too."""
    try:
        from rlcore.cli.main import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
