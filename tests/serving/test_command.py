"""`rlcore serve`: what it passes on, in which order."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.spi import ConfigError, Problem
from rlcore_serve import serving

CHECK_ADDRESS = serving.check_address
GENERATOR = SimpleNamespace(name="gen", version="1.2", distribution="acme-gen")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The calls that the command makes."""
    calls: list[tuple[str, Any]] = []

    def recorded(name: str, result: Any) -> None:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append((name, options or [argument for argument in arguments if not callable(argument)]))
            return result

        monkeypatch.setattr(serving, name, call)

    recorded("check_address", None)
    recorded("find_target", "target")
    recorded("prepare_serving", SimpleNamespace(generator=GENERATOR))
    recorded("served_model", "some/model")
    recorded("serve", None)
    return calls


def test_without_the_library_that_serves_nothing_is_loaded_or_said_to_be_served(invoke, served, monkeypatch) -> None:
    monkeypatch.setattr(serving, "check_address", CHECK_ADDRESS)
    monkeypatch.setattr("rlcore_serve.sessions.server.is_installed", lambda name: name != "aiohttp")
    result = invoke("serve", "runs/demo")
    assert result.exit_code == 3
    assert result.stderr.startswith("error: no package `aiohttp`")
    assert result.stderr.endswith("pip install 'rlcore[serve]'\n")
    assert served == []


def test_serve_passes_on_what_it_was_given(invoke, served) -> None:
    options = [
        "--checkpoint",
        "step-3",
        "--host",
        "::1",
        "--port",
        "9",
        "--name",
        "mine",
        "--generator",
        "gen",
        "--api-key",
        "k",
    ]
    result = invoke("serve", "runs/demo", "a.b=1", *options, "--max-length", "7", "--api-key", "k")
    assert result.exit_code == 0, result.output
    warning, said = result.stderr.splitlines()
    assert warning.startswith("warning: everyone here can read the key")
    assert said == "serving some/model on http://::1:9 with gen 1.2 of acme-gen"
    assert [name for name, _ in served] == ["check_address", "find_target", "prepare_serving", "served_model", "serve"]
    assert served[0][1] == ["::1", 9]
    assert served[1][1] == ["runs/demo", "step-3"]
    assert served[2][1] == ["target", ("a.b=1",), "gen"]
    expected = {"host": "::1", "port": 9, "name": "mine", "max_sequence_length": 7, "api_key": "k"}
    assert {name: value for name, value in served[4][1].items() if name != "note"} == expected


def test_serve_listens_on_this_machine_alone_by_default(invoke, served) -> None:
    assert invoke("serve", "some/model").exit_code == 0
    expected = {"host": "127.0.0.1", "port": 8000, "name": None, "max_sequence_length": None, "api_key": None}
    assert {name: value for name, value in served[4][1].items() if name != "note"} == expected


def test_an_address_that_is_taken_is_found_before_anything_is_looked_for(invoke, served, monkeypatch) -> None:
    def taken(host: str, port: int) -> None:
        raise ConfigError([Problem(path="--port", found=str(port), expected="a port that is free")])

    monkeypatch.setattr(serving, "check_address", taken)
    result = invoke("serve", "some/model")
    assert result.exit_code == 2
    assert "--port: found 8000" in result.stderr
    assert not served


def test_ctrl_c_while_an_export_is_made_is_no_error(invoke, served, monkeypatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "served_model", interrupted)
    assert invoke("serve", "some/model").exit_code == 0
    assert served[-1][0] == "prepare_serving"


@pytest.mark.parametrize("options", [("--port", "0"), ("--port", "65536"), ("--max-length", "1")])
def test_numbers_out_of_range_are_usage_errors(invoke, served, options: tuple[str, str]) -> None:
    assert invoke("serve", "some/model", *options).exit_code == 2
    assert not served
