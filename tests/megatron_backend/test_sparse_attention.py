"""Attention to the keys that an indexer has chosen; test_layout compares whole models with transformers."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from megatron_families import FAMILIES, make_own
from megatron_support import TEMPERATURE, make_backend, make_batch

from rlcore.spi import CheckContext, CloseRequest, LogprobsRequest, ModelSpec
from rlcore_megatron.checks.check import check
from rlcore_megatron.families.models import FAMILIES as REGISTERED
from rlcore_megatron.setup.config import MegatronConfig

SIZES = {"tensor_parallel": 1, "expert_parallel": 1, "context_parallel": 1}


def logprobs(directory: Path) -> np.ndarray:
    backend, batch = make_backend(directory), make_batch(seed=1)
    request = LogprobsRequest(microbatches=(batch,), model="policy", temperature=TEMPERATURE, entropy=False, weight_version=0)
    found = np.concatenate(backend.get_logprobs(request).logprobs)
    backend.close(CloseRequest())
    return found


def test_what_is_chosen_changes_long_sequences_alone(tmp_path: Path) -> None:
    """With as many chosen keys as tokens, queries see all keys, as those of DeepSeek-V3 do."""
    options = {"num_hidden_layers": 2}
    few = logprobs(make_own(tmp_path / "few", "deepseek_v32", **options, index_topk=2))
    most, all_keys = (logprobs(make_own(tmp_path / f"{n}", "deepseek_v32", **options, index_topk=n)) for n in (64, 128))
    np.testing.assert_array_equal(most, all_keys)
    different = np.abs(few - all_keys) > 1e-6
    offsets = make_batch(seed=1).offsets
    for begin, end in pairwise(offsets.tolist()):
        assert not different[begin : min(begin + 3, end)].any(), "the first queries have no more keys than that"
    assert different.any()


@pytest.mark.parametrize(("stages", "layers", "wrong"), [(2, (2, 2), []), (2, (1, 3), [1]), (4, "even", [1, 3])])
def test_a_stage_does_not_begin_with_a_layer_that_takes_anothers_keys(
    stages: int, layers: object, wrong: list[int], tmp_path: Path
) -> None:
    directory = make_own(tmp_path / "model", "glm_moe_dsa")
    config = MegatronConfig(pipeline_parallel=stages, pipeline_layers=layers, **SIZES)
    context = CheckContext(model=ModelSpec(path=str(directory)), world_size=stages, device="cpu", max_sequence_length=16)
    found = [problem.found for problem in check(context, config)]
    named = ", ".join(map(str, wrong))
    assert found == ([f"layers {named}, counted from 0, at the start of a stage or a part of one"] if wrong else [])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (True, True, True, True)),
        ({"index_topk_freq": 2}, (True, True, False, True)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (True, False, True, False)),
        ({"index_topk_pattern": "FSSF"}, (True, False, False, True)),
        ({"indexer_types": ["full", "shared", "full", "full"]}, (True, False, True, True)),
    ],
    ids=str,
)
def test_layers_with_indexers_are_those_of_config_json(values: dict[str, object], expected: tuple[bool, ...]) -> None:
    config = {**FAMILIES["glm_moe_dsa"], "index_topk_freq": 1, "index_skip_topk_offset": 2, **values}
    assert REGISTERED["glm_moe_dsa"](config).indexed == expected
