"""Models loaded in parts: no rank holds, or reads, what is not its own. Cases on several ranks are in fsdp2_load_cases."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_group_cases import WORLD_SIZES, results_of
from fsdp2_load_cases import CASES, assert_is
from fsdp2_support import make_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rlcore.spi import ExportWeightsRequest, ModelError, ModelSpec, RankInfo
from rlcore_fsdp2.export import Exporter
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.policy import make_policy
from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.distributed import process_group
from rlcore_torchkit.huggingface.models import load_model

ARCHITECTURES = installed_model_types()

Tensors = dict[str, Tensor]


@pytest.mark.wide(keep=[f"{name}-4" for name in CASES])
@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_ranks_read_their_own_parts(name, num_ranks):
    for rank, results in enumerate(results_of(num_ranks, "fsdp2_load_cases")):
        assert results[name] == "", f"rank {rank}:\n{results[name]}"


@pytest.fixture
def load_in_parts(backend) -> Callable[[Path], object]:
    """A trainer that shards, on one rank."""
    return lambda directory: backend(directory, config=make_config(cpu_offload=True))


@pytest.fixture
def policy_in_parts() -> Iterator[Callable[[Path], tuple[Any, Exporter]]]:
    """The model that such a trainer trains, and what exports it."""
    process_group.join(RankInfo(), 30.0)
    meshes = ParallelLayout().meshes("cpu")
    config = make_config(cpu_offload=True)
    yield lambda directory: make_policy(ModelSpec(path=str(directory)), config, meshes, torch.device("cpu"))
    process_group.leave()


@pytest.fixture
def rewritten(model_directory, tmp_path) -> Callable[..., Path]:
    """A function (change, architecture, tied) -> a copy of the model with changed tensors."""

    def write(change: Callable[[Tensors], Mapping[str, Tensor]], architecture: str = "qwen3", tied: bool = True) -> Path:
        shutil.copytree(model_directory(architecture, tied), tmp_path / "model")
        file = tmp_path / "model" / "model.safetensors"
        tensors = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        return tmp_path / "model"

    return write


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_that_of_transformers(architecture, tied, model_directory, policy_in_parts):
    directory = model_directory(architecture, tied)
    model, _ = policy_in_parts(directory)
    assert_is(model, load_model(ModelSpec(path=str(directory)), dtype=torch.float32))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_several_files(model_directory, policy_in_parts, tmp_path):
    directory = model_directory("qwen3_moe", False)
    expected = load_model(ModelSpec(path=str(directory)), dtype=torch.float32)
    shutil.copytree(directory, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    expected.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert_is(policy_in_parts(tmp_path / "model")[0], expected)


def test_names_without_the_head_s_prefix_and_a_repeated_tied_head(rewritten, policy_in_parts):
    def change(tensors: Tensors) -> Tensors:
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        return bare | {"lm_head.weight": bare["embed_tokens.weight"].clone()}

    directory = rewritten(change)
    assert_is(policy_in_parts(directory)[0], load_model(ModelSpec(path=str(directory)), dtype=torch.float32))


def test_experts_that_the_files_hold_fused(model_directory, rewritten, policy_in_parts):
    whole = load_model(ModelSpec(path=str(model_directory("qwen3_moe", False))), dtype=torch.float32)
    directory = rewritten(lambda _: dict(whole.named_parameters()), "qwen3_moe", False)
    model, exporter = policy_in_parts(directory)
    assert_is(model, whole)
    request = ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=2**14)
    export = exporter.export(request, dict(model.named_parameters()), torch.device("cpu"))
    assert {spec.name for spec in export.specs} == revert_weight_conversion(whole, whole.state_dict()).keys()


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def changed(name: str, function: Callable[[Tensors], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: function(tensors)}


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("architecture", "change", "found", "expected"),
    [
        ("qwen3", without(NORM), f"no {NORM} in the weights", "every tensor"),
        ("qwen3", changed(NORM, lambda tensors: tensors[NORM][1:]), f"{NORM} of shape [31]", "[32],"),
        ("qwen3_moe", without(EXPERT), f"no {EXPERT} in the weights", "every tensor"),
        ("qwen3_moe", changed(EXPERT, lambda tensors: tensors[EXPERT].T[1:]), f"{EXPERT} of shape [31, 32]", "[32, 32],"),
        (
            "qwen3",
            changed("lm_head.weight", lambda tensors: tensors["model.embed_tokens.weight"] + 1),
            "lm_head.weight that is not model.embed_tokens.weight",
            "one tensor, or tie_word_embeddings = false",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(architecture, change, found, expected, rewritten, load_in_parts):
    directory = rewritten(change, architecture)
    with pytest.raises(ModelError) as raised:
        load_in_parts(directory)
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == (str(directory), found)
    assert problem.expected.startswith(expected)
    assert not torch.distributed.is_initialized(), "nothing is left of the trainer"


def test_a_file_that_cannot_be_read_is_named(rewritten, load_in_parts):
    directory = rewritten(lambda tensors: tensors)
    (directory / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ModelError) as raised:
        load_in_parts(directory)
    assert {problem.path for problem in raised.value.problems} == {str(directory / "model.safetensors")}
