"""The algorithm of sessions: it stands in their plans, and says what they need of a trainer."""

from collections.abc import Iterator

from attrs import frozen

from rlcore.spi import CheckContext, Note, Problem, Provider


@frozen(kw_only=True)
class SessionConfig:
    """`[algorithm.own_loop]`: written by `rlcore.open`. A recipe names no such algorithm."""

    opened: bool = False
    """True in the plan of a session."""
    reference: bool = False
    """True where the session holds the frozen reference model too."""


def check(context: CheckContext, config: SessionConfig) -> Iterator[Problem | Note]:  # noqa: ARG001 - a check's
    """A problem where `rlcore train` or `rlcore eval` is to run it."""
    if not config.opened:
        yield Problem(
            path="algorithm.name",
            found='"own_loop", which makes no steps of its own',
            expected="an algorithm that trains",
            remedy="A program opens a session with rlcore.open(recipe), and makes the steps.",
        )


PROVIDER = Provider(
    name="own_loop",
    spi=(2, 0),
    config=SessionConfig,
    backend="rlcore_session.algorithm:SessionAlgorithm",
    check="rlcore_session.provider:check",
)
