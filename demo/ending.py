"""How the demos end where they cannot go on: with the error, and its exit code."""

import sys
from collections.abc import Callable

from rlcore.spi import RlcoreError


def run_to_end(main: Callable[[], None]) -> None:
    """Call a demo's main; an error of rlcore is printed with its notes, and becomes the exit code."""
    try:
        main()
    except RlcoreError as error:
        print("\n  ".join([f"error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        sys.exit(error.exit_code)
