"""The policy in Megatron's classes on one rank: its size, and what it returns."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron_families import make_own
from megatron_support import TEMPERATURE, Reference, make_batch
from megatron_weights_cases import Opened, opened
from transformers import AutoModelForCausalLM

from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.modules.model import mark_whole_weights, release_graphs, unwrapped
from rlcore_megatron.modules.packing import ForwardOptions, pack
from rlcore_megatron.setup.cpu_shim import cuda_or_cpu
from rlcore_torchkit.testing.models import make_model
from rlcore_torchkit.trainer.microbatch import move

MODELS = {"qwen2": True, "qwen3": False, "qwen3_moe": True}
"""Architecture, and whether its embeddings are tied."""


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy") / request.param, request.param, tied=MODELS[request.param])


@pytest.fixture
def model(directory: Path) -> Iterator[Opened]:
    with opened(directory, ParallelLayout()) as model:
        model.load()
        yield model


def called(model: Opened, **wanted: object) -> torch.Tensor:
    device = next(model.parts[0].parameters()).device
    packed = pack(move(make_batch(), device, ()), model.groups.context, 1, ForwardOptions(temperature=TEMPERATURE, **wanted))
    return model.parts[0](packed.tokens, None, None, packed_seq_params=packed)


def test_it_has_as_many_parameters_as_transformers_model(model: Opened, directory: Path) -> None:
    (part,) = model.parts
    expected = sum(parameter.numel() for parameter in Reference(directory).model.parameters())
    assert sum(parameter.numel() for parameter in part.parameters()) == expected


def test_it_returns_log_probabilities_and_entropies_where_they_are_wanted(model: Opened, directory: Path) -> None:
    with torch.no_grad():
        expected = torch.stack(Reference(directory).logprobs(make_batch()))
    found = called(model, entropy="metric")
    torch.testing.assert_close(found.detach().cpu(), expected, atol=1e-5, rtol=0.0)
    assert found.requires_grad
    alone = called(model, entropy="none")
    torch.testing.assert_close(alone.detach().cpu(), expected[:1], atol=1e-5, rtol=0.0)


def test_dispatchers_keep_nothing_of_their_last_pass(model: Opened) -> None:
    called(model, entropy="none")
    dispatchers = [each.token_dispatcher for each in model.parts[0].modules() if hasattr(each, "token_dispatcher")]
    assert all(vars(dispatcher) for dispatcher in dispatchers)
    release_graphs(model.parts)
    assert not any(vars(dispatcher) for dispatcher in dispatchers)


def test_the_scale_of_embeddings_is_rounded_as_the_weights_are(tmp_path: Path) -> None:
    """As transformers rounds Gemma's in bfloat16: √32 is 5.65625."""
    directory = make_own(tmp_path / "model", "gemma3_text", num_hidden_layers=2)
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).model.embed_tokens(torch.arange(9))
    with opened(directory, ParallelLayout(), "bfloat16") as model, cuda_or_cpu():
        model.load()
        tokens = torch.arange(9, device=next(model.parts[0].parameters()).device)[None]
        found = model.parts[0].embedding(tokens, None)
    assert torch.equal(found[:, 0].cpu(), expected)


def test_parts_are_found_inside_of_what_wraps_them(model: Opened) -> None:
    wrapped = torch.nn.Module()
    wrapped.module = model.parts[0]
    assert unwrapped([wrapped, model.parts[0]]) == [model.parts[0]] * 2


@pytest.mark.parametrize(
    ("name", "mode", "divided"),
    [
        ("self_attention", None, False),
        ("self_attention", "column", True),
        ("self_attention", "row", True),
        ("shared_experts", None, True),
    ],
)
def test_weights_that_each_tensor_rank_holds_whole_are_not_marked_as_divided(
    name: str, mode: str | None, divided: bool
) -> None:
    """TransformerEngine marks all; Megatron adds up the squares of what is marked over tensor ranks."""
    layer = torch.nn.Linear(2, 2)
    layer.parallel_mode = mode
    for parameter in layer.parameters():
        parameter.tensor_model_parallel = True
    mark_whole_weights([torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({name: torch.nn.Sequential(layer)})})])
    assert [parameter.tensor_model_parallel for parameter in layer.parameters()] == [divided] * 2
