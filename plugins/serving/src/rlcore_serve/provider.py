"""The descriptions of `rlcore serve`, of the environment `agent` and of the collector of its episodes."""

from typing import TYPE_CHECKING

from rlcore.spi import SPI_VERSION, CollectorProvider, CommandSpec, LoopObserverProvider, Provider, capabilities
from rlcore_serve.agents.config import AgentConfig

if TYPE_CHECKING:
    from rlcore_serve.sessions.interface import SessionContext, SessionServer

SERVE = CommandSpec(
    name="serve", spi=SPI_VERSION, help="Serve a model over HTTP.", command="rlcore_serve.command:serve_command", priority=60
)
EXPORT = CommandSpec(
    name="export",
    spi=SPI_VERSION,
    help="Write a checkpoint as a model of transformers, or as PEFT's adapters.",
    command="rlcore_serve.export_command:export_command",
    priority=56,
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

CHECKPOINT_EVALUATION = LoopObserverProvider(
    name="checkpoint_evaluation",
    spi=SPI_VERSION,
    observer="rlcore_serve.checkpoint_evaluation.evaluations:checkpoint_evaluations",
    check="rlcore_serve.checkpoint_evaluation.rules:section_problems",
)

AGENTS = CollectorProvider(
    name="agents",
    spi=SPI_VERSION,
    priority=50,
    collector="rlcore_serve.agents.collector:AgentCollector",
    check="rlcore_serve.agents.check:check",
    runs={"agents"},
)


def session_server(context: "SessionContext") -> "SessionServer":
    """Build the server of a run's sessions, whose library is imported only here."""
    from rlcore_serve.sessions.episodes import EpisodeServer

    return EpisodeServer(context)
