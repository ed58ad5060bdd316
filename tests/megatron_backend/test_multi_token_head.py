"""A head that predicts the token after the next, on one rank; layouts are compared in test_layout."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fake_ranks import on_rank
from megatron_support import TEMPERATURE, exported, make_backend, make_batch, split, step_request
from multi_token_reference import make_with_head
from safetensors.torch import load_file, save_file

from rlcore.spi import CheckpointError, CloseRequest, LoadStateRequest, ModelError, SaveStateRequest
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.modules.multi_token_head import logprobs_ahead
from rlcore_megatron.modules.packing import ForwardOptions, empty_like, pack
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.head.logprobs import token_logprobs
from rlcore_torchkit.trainer.microbatch import Microbatch, move

BATCH = make_batch()
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_head(tmp_path_factory.mktemp("head") / "model", "glm4_moe", num_hidden_layers=2)


@pytest.fixture
def make(directory: Path) -> Iterator[Callable[..., MegatronBackend]]:
    """A function (a model's directory, options of the section) -> a backend; all are closed at the end."""
    made = []

    def make(path: Path = directory, dtype: str = "float32", **options: object) -> MegatronBackend:
        config = MegatronConfig(collective_timeout_s=600.0, **{"mtp": True, **options})
        made.append(make_backend(path, config=config, dtype=dtype))
        return made[-1]

    yield make
    for backend in made:
        backend.close(CloseRequest())


def step(backend: MegatronBackend, version: int = 0, groups=((0, 1, 2), (3, 4, 5))):
    return backend.train_step(step_request(split(BATCH, groups), BATCH.counts(), version))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_trains_bit_for_bit_as_without(make, dtype):
    options = {"dtype": dtype, "transformer": {"moe_z_loss_coeff": 0.01}}
    plain, with_head = make(mtp=False, **options), make(**options)
    for version in range(2):
        expected, found = step(plain, version), step(with_head, version)
        assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
        of_head = {"mtp_loss", "mtp_grad_norm"}
        assert {name: value for name, value in found.metrics.items() if name not in of_head} == expected.metrics
        assert of_head < found.metrics.keys()
    weights, others = exported(plain, 2), exported(with_head, 2)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_the_loss_does_not_depend_on_microbatches_and_its_weight_scales_the_gradient(make):
    together, apart = make(), make(mtp_loss_weight=0.3)
    expected, found = step(together), step(apart, groups=[[n] for n in range(6)])
    assert found.metrics["mtp_loss"] == pytest.approx(expected.metrics["mtp_loss"], rel=1e-5)
    assert found.metrics["mtp_grad_norm"] == pytest.approx(3 * expected.metrics["mtp_grad_norm"], rel=1e-4)
    assert expected.metrics["mtp_grad_norm"] > 0


def test_a_saved_model_holds_the_files_tensors(make, directory, tmp_path):
    backend = make()
    backend.save_state(SaveStateRequest(directory=tmp_path, kind="hf"))
    expected, found = load_file(directory / FILE), load_file(tmp_path / FILE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_with_a_head_is_none_for_a_run_without(make, tmp_path):
    backend = make()
    backend.save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
    with pytest.raises(CheckpointError, match="multi_token_head"):
        make(mtp=False).load_state(LoadStateRequest(directory=tmp_path))


@pytest.fixture
def rewritten(directory: Path, tmp_path: Path) -> Callable[[Callable[[dict], None]], Path]:
    """A function -> the model's directory with its tensors changed by that."""

    def rewrite(change: Callable[[dict], None]) -> Path:
        shutil.copytree(directory, tmp_path / "other")
        tensors = load_file(directory / FILE)
        change(tensors)
        save_file(tensors, tmp_path / "other" / FILE, metadata={"format": "pt"})
        return tmp_path / "other"

    return rewrite


def test_files_need_no_copies_of_what_is_shared(make, rewritten, directory):
    copies = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
    found = make(rewritten(lambda tensors: [tensors.pop(name) for name in copies]))
    assert step(found).metrics == step(make()).metrics


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_is_another_is_refused(make, rewritten, name):
    path = rewritten(lambda tensors: tensors[f"model.layers.2.{name}.weight"].add_(1.0))
    with pytest.raises(ModelError, match=rf"model\.layers\.2\.{name}\.weight"):
        make(path)


def test_files_without_the_head_are_refused(make, rewritten):
    path = rewritten(lambda tensors: tensors.pop("model.layers.2.eh_proj.weight"))
    with pytest.raises(ModelError, match="num_hidden_layers"):
        make(path)


def ahead(batch: Microbatch, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with on_rank(0, 1):
        packed = pack(batch, dist.group.WORLD, 1, ForwardOptions(temperature=TEMPERATURE, entropy="none", ahead=True))
        return logprobs_ahead(hidden, packed, partial(token_logprobs, weight=weight))


def test_no_token_is_told_by_another_sequence():
    batch = move(BATCH, torch.device("cpu"), ())
    hidden, weight = torch.randn(BATCH.num_tokens, 8, dtype=torch.float64), torch.randn(100, 8, dtype=torch.float64)
    expected = torch.zeros(BATCH.num_tokens, dtype=torch.float64)
    for first, beyond in zip(BATCH.offsets, BATCH.offsets[1:], strict=False):
        for place in range(first + 2, beyond):
            expected[place] = (weight @ hidden[place - 2] / TEMPERATURE).log_softmax(0)[BATCH.tokens[place]]
    torch.testing.assert_close(ahead(batch, hidden, weight), expected, atol=1e-12, rtol=0.0)


def test_two_tokens_tell_nothing_and_have_a_gradient_of_zero():
    batch = empty_like(move(BATCH, torch.device("cpu"), ()))
    hidden = torch.randn(2, 8, requires_grad=True)
    found = ahead(batch, hidden, torch.randn(100, 8))
    assert found.tolist() == [0.0, 0.0]
    found.sum().backward()
    assert not hidden.grad.any()
