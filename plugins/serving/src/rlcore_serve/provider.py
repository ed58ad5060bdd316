"""The descriptions of `rlcore serve` and of the environment `agent`."""

from typing import TYPE_CHECKING

from rlcore.spi import SPI_VERSION, CommandSpec, Provider, capabilities
from rlcore_serve.agents.config import AgentConfig

if TYPE_CHECKING:
    from rlcore.run.protocols import LoopObserver
    from rlcore.spi import EvaluatedRun, SessionContext, SessionServer

SERVE = CommandSpec(
    name="serve", spi=SPI_VERSION, help="Serve a model over HTTP.", command="rlcore_serve.command:serve_command", priority=60
)

AGENT = Provider(
    name="agent",
    spi=SPI_VERSION,
    config=AgentConfig,
    backend="rlcore_serve.agents.environment:AgentBackend",
    capabilities={capabilities.AGENT},
    max_concurrent=lambda config: config.max_concurrent,
    check="rlcore_serve.agents.environment:check",
)


def session_server(context: "SessionContext") -> "SessionServer":
    """Build the server of a run's sessions, whose library is imported only here."""
    from rlcore_serve.sessions.episodes import EpisodeServer

    return EpisodeServer(context)


def checkpoint_evaluator(run: "EvaluatedRun") -> "LoopObserver":
    """Build what runs the recipe's program on the run's checkpoints."""
    from rlcore_serve.checkpoint_evaluation.evaluations import CheckpointEvaluations

    return CheckpointEvaluations(run)
