"""What is refused of an environment before a run, and what it must not change of the process."""

import signal
from pathlib import Path

import pytest

from rlcore.spi import ConfigError, PluginError
from rlcore_verifiers import loading
from rlcore_verifiers.config import VerifiersConfig
from rlcore_verifiers.loading import load
from rlcore_verifiers.package import unavailable

WORLDS = "verifiers-worlds"


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := unavailable():
        pytest.skip(missing)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.usefixtures("_installed")
def test_signals_stay_with_the_run() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    load(VerifiersConfig(name=WORLDS))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"kind": "group"}, "whole group"),
        ({"size": 1}, "size=1.*unexpected keyword"),
        ({"training": False, "evaluation": False}, "dataset"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(arguments: dict[str, str | int], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        load(VerifiersConfig(name=WORLDS, args=arguments))


@pytest.mark.usefixtures("_installed")
def test_an_unknown_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="prime env install owner/nothing-here"):
        load(VerifiersConfig(name="owner/nothing-here"))


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "unavailable", lambda: "verifiers is not installed")
    with pytest.raises(PluginError, match="not installed"):
        load(VerifiersConfig(name=WORLDS))
