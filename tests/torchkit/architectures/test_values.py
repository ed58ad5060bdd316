"""Whatever config.json holds, checks name it or compute with it: none raises."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rlcore_fsdp2.check
import rlcore_megatron.checks.check
import rlcore_transformers.check
import rlcore_vllm.checks.check
from rlcore.spi import CheckContext, ModelSpec, Problem
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.architectures.registry import find_architecture
from rlcore_torchkit.architectures.values import TYPES
from rlcore_transformers.config import TransformersConfig
from rlcore_vllm.setup.config import VllmConfig

CONFIG = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 128}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 512}
ROPE = ("rope_type", "type", "factor", "original_max_position_embeddings")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just("yarn")
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(ROPE) | st.text(max_size=2), inner, max_size=3),
    max_leaves=4,
)
KEYS = (
    *TYPES,
    "sliding_window",
    "use_sliding_window",
    "architectures",
    "quantization_config",
    "dtype",
    "num_local_experts",
    "hidden_act",
)


@pytest.fixture
def context(tmp_path: Path) -> CheckContext:
    return CheckContext(
        model=ModelSpec(path=str(tmp_path)), device="cpu", world_size=1, max_sequence_length=64, replays_routing=True
    )


def test_a_null_in_a_table_is_as_good_as_no_key(context: CheckContext) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": None}
    (Path(context.model.path) / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": rope}))
    assert isinstance(rlcore_vllm.checks.check.check(context, VllmConfig()), list)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
@pytest.mark.parametrize(
    ("check", "section"),
    [
        (rlcore_fsdp2.check.check, Fsdp2Config(fp8=True)),
        (rlcore_megatron.checks.check.check, MegatronConfig()),
        (rlcore_transformers.check.check, TransformersConfig()),
        (rlcore_vllm.checks.check.check, VllmConfig()),
    ],
    ids=["fsdp2", "megatron", "transformers", "vllm"],
)
def test_no_check_raises(
    check: Callable[[CheckContext, Any], list[Problem]], section: Any, changes: dict[str, Any], context: CheckContext
) -> None:
    (Path(context.model.path) / "config.json").write_text(json.dumps(CONFIG | changes))
    assert all(isinstance(problem, Problem) for problem in check(context, section))


@pytest.mark.parametrize(
    ("key", "value", "found", "expected"),
    [
        ("layer_types", 5, "layer_types = 5 (an integer)", "an array of strings"),
        ("layer_types", ["full_attention", 5], "layer_types[1] = 5 (an integer)", "a string"),
        ("num_key_value_heads", "8", 'num_key_value_heads = "8" (a string)', "an integer"),
        ("num_key_value_heads", 0, "num_key_value_heads = 0", "an integer of at least 1"),
        ("num_local_experts", True, "num_local_experts = true", "an integer"),
        ("mlp_only_layers", 5, "mlp_only_layers = 5 (an integer)", "an array of integers of at least 0"),
        ("rope_scaling", "yarn", 'rope_scaling = "yarn" (a string)', "a table"),
        ("rope_scaling", {"factor": "2"}, 'rope_scaling.factor = "2" (a string)', "a number"),
        ("use_sliding_window", "false", 'use_sliding_window = "false" (a string)', "true or false"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps = nan", "a finite number from 0 to 1"),
        ("rms_norm_eps", -1.0, "rms_norm_eps = -1.0", "a number from 0 to 1"),
        ("rms_norm_eps", "1e-6", 'rms_norm_eps = "1e-6" (a string)', "a number"),
        ("rope_theta", 0, "rope_theta = 0", "a number above 0 and at most 1e+30"),
        ("rope_parameters", {"rope_theta": -1.0}, "rope_parameters.rope_theta = -1.0", "a number above 0 and at most 1e+30"),
        ("rope_parameters", {"rope_theta": "1e4"}, 'rope_parameters.rope_theta = "1e4" (a string)', "a number"),
    ],
)
def test_a_malformed_value_is_named_with_its_key_in_the_file(key: str, value: object, found: str, expected: str) -> None:
    family = find_architecture(CONFIG, "config.json")
    assert not isinstance(family, Problem)
    (problem,) = family.problems(CONFIG | {key: value}, "config.json")
    assert (problem.path, problem.found, problem.expected) == ("config.json", found, expected)
