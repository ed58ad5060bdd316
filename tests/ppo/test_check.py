"""Options that do nothing, or are out of their ranges."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.run.plan.prepare import prepare
from rlcore.spi import CheckContext, ConfigError, ModelSpec
from rlcore_ppo.check import check
from rlcore_ppo.config import PpoConfig
from rlcore_torchkit.testing.models import make_model


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    path = folder / "recipe.toml"
    path.write_text(
        f'[model]\npath = "{make_model(folder / "model")}"\n[algorithm]\nname = "ppo"\n[environment]\nname = "arithmetic"\n'
    )
    return path


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gamma", "0"),
        ("gamma", "1.1"),
        ("gae_lambda", "-0.1"),
        ("gae_lambda", "2"),
        ("value_clip", "0"),
    ],
)
def test_a_value_out_of_range_is_refused(recipe: Path, option: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(recipe, [f"algorithm.ppo.{option}={value}"])
    assert [problem.path for problem in raised.value.problems] == [f"algorithm.ppo.{option}"]


@pytest.mark.parametrize(
    ("option", "value", "beside"),
    [
        ("kl_estimator", "k3", {"kl_coefficient": 0.1}),
        ("advantage_epsilon", 0.1, {"advantage_normalisation": "batch_whitening"}),
        ("importance_maximum", 3.0, {"importance_correction": "token"}),
    ],
)
def test_an_option_that_does_nothing_is_refused(option: str, value: Any, beside: dict[str, Any]) -> None:
    context = CheckContext(model=ModelSpec(path="model"), device="cpu", world_size=1, max_sequence_length=8)
    alone: dict[str, Any] = {"advantage_normalisation": "none", "importance_correction": "none", option: value}
    assert [problem.path for problem in check(context, PpoConfig(**alone))] == [f"algorithm.ppo.{option}"]
    assert not check(context, PpoConfig(**{option: value, **beside}))
