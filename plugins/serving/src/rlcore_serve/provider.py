"""The descriptions of `rlcore serve` and of the environment `agent`."""

from typing import TYPE_CHECKING, Any

from rlcore.spi import SPI_VERSION, CommandSpec, LoopObserverProvider, Provider, capabilities
from rlcore_serve.agents.config import AgentConfig

if TYPE_CHECKING:
    from rlcore.config.recipe import RolloutConfig
    from rlcore.spi import SessionContext, SessionServer
    from rlcore_serve.agents.collector import AgentCollector

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

CHECKPOINT_EVALUATION = LoopObserverProvider(
    name="checkpoint_evaluation",
    spi=SPI_VERSION,
    observer="rlcore_serve.checkpoint_evaluation.evaluations:checkpoint_evaluations",
    check="rlcore_serve.checkpoint_evaluation.rules:section_problems",
)


def agent_collector(rollout: "RolloutConfig", **parts: Any) -> "AgentCollector":
    """Build the collector of agents' episodes."""
    from rlcore.registry.functions import session_server
    from rlcore_serve.agents.collector import AgentCollector

    return AgentCollector(
        server=session_server,
        max_sequence_length=rollout.max_sequence_length,
        history="segment" if rollout.history == "segment" else "refuse",
        **parts,
    )


def session_server(context: "SessionContext") -> "SessionServer":
    """Build the server of a run's sessions, whose library is imported only here."""
    from rlcore_serve.sessions.episodes import EpisodeServer

    return EpisodeServer(context)
