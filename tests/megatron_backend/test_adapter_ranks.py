"""Adapters of a smaller rank than the recipe's, against a recipe of that rank and PEFT's own model."""

from pathlib import Path

import megatron_support  # noqa: F401 - which finds the modules of the other trainer's tests
import pytest
import rank_cases
import rank_launch
from megatron_lora_cases import make as make_megatron

from rlcore.spi import TrainerContext
from rlcore_megatron.backend import MegatronBackend

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
}


def make(context: TrainerContext) -> MegatronBackend:
    return make_megatron(context, {})


def make_layout(context: TrainerContext, layout: str) -> MegatronBackend:
    return make_megatron(context, LAYOUTS[layout])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rank_cases.make_rank_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.mark.parametrize("optimizer", rank_cases.CASES)
def test_smaller_rank_equals_a_recipe_of_that_rank(optimizer: str, model: Path, tmp_path: Path) -> None:
    rank_cases.check_equals_a_recipe_of_that_rank(make, model, rank_cases.CASES[optimizer], tmp_path)


def test_exports_agree_with_peft(model: Path, tmp_path: Path) -> None:
    rank_cases.check_exports_agree(make, model, tmp_path)


def test_rank_is_remembered(model: Path, tmp_path: Path) -> None:
    rank_cases.check_rank_is_remembered(make, model, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_process(layout: str, model: Path, tmp_path: Path) -> None:
    rank_launch.launch(rank_cases.run_layout, (2, model.parent, make_layout, layout), 2)
    rank_cases.check_layout(model.parent, layout, rank_cases.trained_adapter(make, model, tmp_path / "one"))
