"""Loading an environment: what is wrong with it is said before anything is allocated."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlcore.spi import ConfigError, PluginError, Problem
from rlcore_verifiers.config import VerifiersConfig
from rlcore_verifiers.package import check, unavailable

if TYPE_CHECKING:
    import verifiers

SECTION = "environment.verifiers"


def load(config: VerifiersConfig) -> "verifiers.Environment":
    """The environment that a section names. PluginError where `verifiers` is missing; ConfigError where the environment is
    missing, does not load, or has rewards that no single episode has."""
    if (reason := unavailable()) is not None:
        raise PluginError(reason)
    if problems := check(None, config):
        raise ConfigError(problems)
    import verifiers

    try:
        with _kept_signals():
            environment = verifiers.load_environment(config.name, **config.args)
    except Exception as error:  # whatever the environment's own module raises
        arguments = ", ".join(f"{name}={value!r}" for name, value in config.args.items()) or "no arguments"
        found = f"{config.name!r}, which does not load with {arguments} ({type(error).__name__}: {error})"
        raise ConfigError([Problem(path=SECTION, found=found, expected="an environment that loads")]) from error
    if problems := list(_unfit(config, environment)):
        raise ConfigError(problems)
    return environment


def _unfit(config: VerifiersConfig, environment: "verifiers.Environment") -> Iterator[Problem]:
    path = f"{SECTION}.name"
    if not hasattr(environment, "run_rollout"):
        expected = "an environment with `run_rollout`, such as a SingleTurnEnv, MultiTurnEnv or ToolEnv"
        yield Problem(path=path, found=f"{config.name!r}, which is a {type(environment).__name__}", expected=expected)
        return
    if environment.requires_group_rollouts:
        found = f"{config.name!r}, whose rubric rewards a whole group of episodes together"
        remedy = "Here an episode is rewarded when it ends: write its reward functions for one `completion`."
        yield Problem(path=path, found=found, expected="a rubric that rewards each episode by itself", remedy=remedy)
    if environment.provides_advantages:
        found = f"{config.name!r}, whose rubric computes advantages"
        yield Problem(path=path, found=found, expected="a rubric of rewards: advantages are the algorithm's")


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Environments of `verifiers` take SIGINT and SIGTERM over, by which the run stops with a checkpoint."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    taken = False
    try:
        yield
    except KeyboardInterrupt:
        taken = any(signal.getsignal(number) is not handler for number, handler in kept.items())
        raise
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if taken:
            signal.raise_signal(signal.SIGINT)  # time limits around this have not seen the one that their handler took
