"""The training server of `rlcore serve --train`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore_serve.training_server import TrainingServerContext


def training_server(context: "TrainingServerContext") -> None:
    """Serve until the process is interrupted. Its libraries are imported only here."""
    from rlcore_tinker.server import serve

    serve(context)
