"""Faults of the section are found before any request to an endpoint."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.spi import CheckContext, ModelSpec
from rlcore_openai.check import check
from rlcore_openai.config import OpenAIConfig
from rlcore_torchkit.testing.models import make_model

CONTEXT = CheckContext(model=ModelSpec(path="none"), device="cpu", world_size=1, max_sequence_length=8)
RECIPE = """
[model]
path = "{model}"
[algorithm]
name = "grpo"
[environment]
name = "arithmetic"
[data.evaluation]
[run]
device = "cpu"
[generator]
name = "openai"
"""


def found(*urls: str, **options: Any) -> list[str]:
    return [f"{one.path}: {one.found}" for one in check(CONTEXT, OpenAIConfig(base_urls=urls, **options))]


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "1")
    assert found("https://a/v1", "http://10.0.0.1:8000/v1") == []
    assert found("http://localhost:1/v1", "http://[::1]:1/v1", "http://127.0.0.9/v1", "https://a/v1", api_key_env="K") == []
    assert found("http://10.0.0.1/v1", api_key_env="K") == ["generator.openai.base_urls: http://10.0.0.1/v1, with api_key_env"]
    assert found("a/v1") == ["generator.openai.base_urls: 'a/v1'"]
    assert found("https://me:secret@a/v1") == ["generator.openai.base_urls: '…@a/v1'"]
    assert found("https://a/v1", "https://a/v1/") == ["generator.openai.base_urls: the same address twice"]


def test_a_key_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K", raising=False)
    assert found("https://a/v1", api_key_env="K") == ["generator.openai.api_key_env: K, which is not set"]


def test_a_run_that_trains_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(model=make_model(tmp_path / "model")))
    address = 'generator.openai.base_urls=["http://127.0.0.1:1/v1"]'
    refused = CliRunner().invoke(cli, ["check", str(recipe), address])
    assert refused.exit_code == 3
    assert "takes no weights of a trainer" in refused.stderr
    unnamed = CliRunner().invoke(cli, ["eval", str(recipe)])
    assert unnamed.exit_code == 2
    assert "generator.openai.base_urls" in unnamed.stderr
