"""End a command on an error: with one message on stderr and a documented exit code."""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from rlcore.__main__ import INTERRUPTED
from rlcore.files import private
from rlcore.schema.printable import class_name, printable
from rlcore.schema.problem import RlcoreError
from rlcore.secrets import masked, masked_traceback

UNEXPECTED = 70
"""Exit code of what no one foresaw: EX_SOFTWARE of sysexits.h."""
RUN_DIRECTORY = "rlcore.run_directory"
"""Key of the root context's meta, under which a run leaves its directory for the traceback."""
COMMAND_OWNER = "rlcore.command_owner"
"""Key of the root context's meta, which holds the label of a command of another package."""


class ReportingGroup(click.Group):
    """A group that reports what its commands raise."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except BaseException as error:
            # click ends commands by exceptions of its own, above: a SystemExit is a plugin's, or that of a library it uses, and
            # so is what is no Exception at all, such as a panic in Rust.
            if ctx.params.get("debug"):
                click.echo(printable(masked_traceback(error)), err=True)
            code, message = _judge(error, ctx)
            report(message)
            raise click.exceptions.Exit(code) from error


def _judge(error: BaseException, ctx: click.Context) -> tuple[int, str]:
    """The exit code and what to say."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    # Imported here: what that imports takes long enough for a Ctrl-C, which nothing would report yet.
    from rlcore.installed import DistributionError, metadata_faults
    from rlcore.registry.plugin_errors import message_of

    if isinstance(error, DistributionError):
        return error.exit_code, str(error)
    faults = metadata_faults(error)
    if isinstance(error, RlcoreError):
        return error.exit_code, "\n  ".join([f"{message_of(error)}{notes_of(error)}", *faults])
    if faults:
        return DistributionError.exit_code, "\n".join(faults)
    return UNEXPECTED, f"{_unexpected(error, ctx)}{notes_of(error)}"


def notes_of(error: BaseException) -> str:
    """The notes that were added to an error, each on an indented line of its own after a line break; "" where it has none."""
    return "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))


def report(message: str) -> None:
    """Print an error's message."""
    click.echo(f"{click.style('error:', fg='red', bold=True)} {printable(masked(message))}", err=True, color=color_setting())


def color_setting() -> bool | None:
    """False where NO_COLOR is set to anything (no-color.org), else None: click decides by the stream."""
    return False if os.environ.get("NO_COLOR") else None


def _unexpected(error: BaseException, ctx: click.Context) -> str:
    """Return the message for an error that is no RlcoreError, and save its traceback to a file."""
    from rlcore.registry.plugin_errors import message_of, owner_of

    what = ": ".join(filter(None, (class_name(error), message_of(error))))
    if isinstance(error, SystemExit):
        what = f"SystemExit({error.code!r}), which would have ended the process in silence"
    owner = owner_of(error) or ctx.meta.get(COMMAND_OWNER)
    origin = "This is a defect of rlcore, of a plugin, or of a library that they use."
    if isinstance(error, ImportError):
        origin = "`rlcore doctor` lists packages that do not fit together."
    elif owner is not None:
        origin = f"It comes from {owner}, or from a library that it uses."
    text = f"unexpected {what}. {origin}"
    if ctx.params.get("debug"):
        return text
    run_directory = ctx.meta.get(RUN_DIRECTORY)
    saved = _save_traceback(error, run_directory)
    where = (
        f"The traceback is in {saved}; --debug shows it here." if saved else "Run again as `rlcore --debug ...` to see where."
    )
    kept = " What the run saved is intact; --resume continues from its newest checkpoint." if run_directory else ""
    return f"{text} {where}{kept}"


def _save_traceback(error: BaseException, run_directory: Path | None) -> Path | None:
    """Write a traceback to the run directory, else to the folder for temporary files. None where neither can be written."""
    name = f"traceback-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for directory in (run_directory, Path(tempfile.gettempdir())):
        try:
            if directory is not None:
                path = directory / name
                with open(path, "x", encoding="utf-8", errors="replace", opener=private) as file:
                    file.write(f"{masked(' '.join(sys.argv))}\n\n{masked_traceback(error)}")
                return path
        except OSError:
            continue
    return None
