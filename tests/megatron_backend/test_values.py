"""A head of values in every layout of Megatron against plain transformers in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve
from lora_cases import cases, results_of
from megatron_value_cases import LAYOUTS, run_all
from rank_launch import collected
from value_cases import prepare

from rlcore.spi import CheckContext, ModelSpec
from rlcore_megatron.checks.check import check
from rlcore_megatron.setup.config import MegatronConfig

from ..tiers import each_part

KEPT = {*each_part([name for num_ranks, name in cases(LAYOUTS) if num_ranks < 4])}
"""Each layout of fewer than four ranks and each family once."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("values")
    prepare(root)
    return root


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> Callable[[int], list[dict[str, str]]]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""
    names = {case["name"] for case in collected(request, "test_layouts_equal_plain_transformers")}
    return results_of(root, run_all, names)


@pytest.mark.wide(keep=[f"{number}-{name}" for number, name in cases(LAYOUTS) if name in KEPT])
@pytest.mark.parametrize(("num_ranks", "name"), cases(LAYOUTS))
def test_layouts_equal_plain_transformers(num_ranks, name, results):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())


def test_weights_in_megatrons_format_have_no_head_of_values(root):
    model = ModelSpec(path=str(root / "models" / "qwen3"))
    context = CheckContext(model=model, device="cpu", world_size=1, max_sequence_length=16, head="value")
    assert not check(context, MegatronConfig())
    (problem,) = check(context, MegatronConfig(conversion_cache=True))
    assert problem.path == "trainer.megatron.conversion_cache"
    (problem,) = check(evolve(context, head="tokens"), MegatronConfig())
    assert "Qwen3ForSequenceClassification" in problem.found
