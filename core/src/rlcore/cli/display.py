"""Opens what shows a run: the installed display, or plain lines."""

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rlcore.cli.errors import RUN_DIRECTORY
from rlcore.published_plugins import remedy_for
from rlcore.registry.plugin_errors import attributed
from rlcore.registry.run_parts import only_function
from rlcore.run.report.plain_progress import PlainProgress
from rlcore.run.report.progress import Progress
from rlcore.spi import PluginError


@contextmanager
def open_display(mode: str, meta: MutableMapping[str, Any]) -> Iterator[Progress]:
    """The display for "auto", "live", "plain" or "silent"; leaves the run's directory in `meta` for error messages. PluginError
    for "live" where no installed package has it."""
    shown = Progress() if mode == "silent" else _display(mode)
    try:
        with shown if isinstance(shown, AbstractContextManager) else nullcontext():
            yield shown
    finally:
        meta[RUN_DIRECTORY] = shown.run_directory


def _display(mode: str) -> Progress:
    installed = only_function("display")
    if installed is not None and installed.function is not None:
        with attributed("raised by", installed.label):
            shown = installed.function(mode)
        if not isinstance(shown, Progress):
            raise PluginError(f"{installed.label} returned a {type(shown).__name__}; expected a Progress")
        return shown
    if mode == "live":
        raise PluginError(f'found no live display; expected one in rlcore.displays, or "plain". {remedy_for("display")}')
    return PlainProgress()
