"""The output of a process that Ray makes, in a file of the run."""

import os
import sys
from pathlib import Path


def redirect_output(log_file: Path) -> None:
    """Append what this process and its children print to a file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Python's streams may be Ray's own, which write elsewhere.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, errors="replace")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
