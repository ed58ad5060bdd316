"""The interface of training servers: packages that answer the API of `rlcore serve --train`.

In `pyproject.toml`::

    [project.entry-points."rlcore.training_servers"]
    tinker = "my_package.provider:training_server"

`training_server(context)` serves until the process is interrupted.
"""

from collections.abc import Callable

from attrs import field, frozen

from rlcore.registry.run_parts import call_function


@frozen(kw_only=True)
class TrainingServerContext:
    """The arguments of `rlcore serve --train`."""

    recipe: str
    """The recipe's file."""
    overrides: tuple[str, ...]
    """KEY=VALUE of the command line."""
    host: str
    port: int
    name: str | None
    """The model's name for clients; None for the recipe's own."""
    api_key: str | None
    """The key that clients have to send; None for one that the server makes."""
    note: Callable[[str], None] = field(eq=False)
    """Prints a line for the user, with secrets masked."""
    tell: Callable[[str], None] = field(eq=False)
    """Prints a line as it is."""


def serve_training(context: TrainingServerContext) -> None:
    """Serve until the process is interrupted. PluginError where no training server is installed, or several."""
    call_function("training_server", context)
