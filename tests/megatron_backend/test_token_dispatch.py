"""What dispatchers of experts keep after a pass: nothing that grows with its tokens."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_support import make_backend, make_batch, step_request
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcore.spi import CloseRequest, LogprobsRequest, OptimizerSpec
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.modules.model import unwrapped
from rlcore_megatron.modules.token_dispatch import CONSTANTS, forget_tokens
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.testing.models import make_model

BATCH = make_batch()


class Storages(TorchDispatchMode):
    """The memory of all tensors that are made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:  # neither a view nor in place
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self) -> list[int]:
        """Bytes of each that something still refers to."""
        return [num_bytes for storage, num_bytes in self._made.values() if not storage.expired()]


TRAINERS = (
    pytest.param(("qwen3_moe", "none", {}), id="none"),
    pytest.param(("qwen3_moe", "full", {}), id="full"),
    pytest.param(("qwen3_moe", "full", {"moe_token_dispatcher_type": "allgather"}), id="allgather"),
    pytest.param(("glm4_moe", "full", {"moe_shared_expert_overlap": True}), id="shared_expert"),
)


@pytest.fixture(params=TRAINERS)
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MegatronBackend]:
    family, recompute, transformer = request.param
    model = make_model(tmp_path / family, family)
    config = MegatronConfig(collective_timeout_s=600.0, recompute=recompute, transformer=transformer)
    made = make_backend(model, config=config, optimizer=OptimizerSpec(learning_rate=0.001))
    yield made
    made.close(CloseRequest())


def dispatchers(trainer: MegatronBackend) -> list[MoETokenDispatcher]:
    modules = [module for model in trainer.models for module in model.modules()]
    return [module.token_dispatcher for module in modules if hasattr(module, "token_dispatcher")]


def test_nothing_of_a_step_is_left_that_grows_with_its_tokens(trainer: MegatronBackend) -> None:
    """A recomputed layer's input and its gradient would be, which the graph of the kept probabilities refers to."""
    assert dispatchers(trainer)
    request = step_request((BATCH, BATCH), BATCH.counts(), 0)
    trainer.train_step(request)  # the optimizer's state is made, and what Megatron caches
    with Storages() as storages:
        trainer.train_step(evolve(request, weight_version=1))
    assert max(storages.alive(), default=0) < BATCH.num_tokens


def test_nothing_of_log_probabilities_either(trainer: MegatronBackend) -> None:
    request = LogprobsRequest(microbatches=(BATCH,), model="policy", temperature=1.0, entropy=False, weight_version=0)
    first = trainer.get_logprobs(request).logprobs[0]
    with Storages() as storages:
        again = trainer.get_logprobs(request).logprobs[0].copy()
    assert (first == again).all()
    assert max(storages.alive(), default=0) < BATCH.num_tokens


def test_constants_are_all_that_dispatchers_hold_at_first(trainer: MegatronBackend) -> None:
    """Of this Megatron-Core: what is dropped is made anew for each microbatch."""
    held = [{name for name, value in vars(each).items() if isinstance(value, Tensor)} for each in dispatchers(trainer)]
    gathers = trainer.models[0].config.moe_token_dispatcher_type == "allgather"
    assert held == [set() if gathers else CONSTANTS] * len(held)
    trainer.train_step(step_request((BATCH,), BATCH.counts(), 0))
    after = [{name for name, value in vars(each).items() if isinstance(value, Tensor)} for each in dispatchers(trainer)]
    assert after == held


def test_dispatchers_of_deepep_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Megatron's own manager of them, and what its kernels would return on a GPU."""

    def dispatched(states: Tensor, indices: Tensor, probs: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
        return states, indices, probs, torch.full((4,), indices.numel() // 4), object()

    monkeypatch.setattr(token_dispatcher, "fused_dispatch", dispatched)
    monkeypatch.setattr(token_dispatcher, "set_deepep_num_sms", lambda _: None)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=4, moe_router_topk=2)
    manager = token_dispatcher._DeepepManager(None, 4, 2, 4, config)
    before = vars(manager).copy()
    layer = torch.nn.Module()
    layer.token_dispatcher = SimpleNamespace(_comm_manager=manager)
    probs = torch.rand(6, 4, requires_grad=True).softmax(-1)
    states = torch.rand(6, 8)
    manager.setup_metadata(probs > 0, probs)
    manager.dispatch(states)
    permuted, _ = manager.get_permuted_hidden_states_by_experts(states)
    manager.get_restored_hidden_states_by_experts(permuted)
    assert manager.token_probs.grad_fn is not None
    forget_tokens([torch.nn.Sequential(layer)])
    assert not [name for name, value in vars(manager).items() if isinstance(value, Tensor)]
    assert all(vars(manager)[name] is value for name, value in before.items() if name != "handle")


class Broken(RuntimeError):
    """What a layer or a loss raises in the middle of a pass."""


def failing(*_: Any, **__: Any) -> None:
    raise Broken


def last_norm(trainer: MegatronBackend) -> torch.nn.Module:
    """Behind all experts, whose dispatchers hold their tokens by then."""
    return unwrapped(trainer.models)[0].decoder.final_layernorm


def test_nothing_of_a_step_that_fails_is_left(trainer: MegatronBackend) -> None:
    """Forward and in the backward pass; the step is then made as if nothing had been."""
    request = step_request((BATCH, BATCH), BATCH.counts(), 0)
    trainer.train_step(request)
    again = evolve(request, weight_version=1)
    norm = last_norm(trainer)
    for hook in (norm.register_forward_hook, norm.register_full_backward_hook):
        with Storages() as storages:
            handle = hook(failing)
            with pytest.raises(Broken):
                trainer.train_step(again)
            handle.remove()
            assert max(storages.alive(), default=0) < BATCH.num_tokens
    assert trainer.train_step(again).weight_version == 2


def test_nothing_of_log_probabilities_that_fail_is_left(trainer: MegatronBackend) -> None:
    request = LogprobsRequest(microbatches=(BATCH,), model="policy", temperature=1.0, entropy=False, weight_version=0)
    expected = trainer.get_logprobs(request).logprobs[0].copy()
    with Storages() as storages:
        handle = last_norm(trainer).register_forward_hook(failing)
        with pytest.raises(Broken):
            trainer.get_logprobs(request)
        handle.remove()
        assert max(storages.alive(), default=0) < BATCH.num_tokens
    assert (trainer.get_logprobs(request).logprobs[0] == expected).all()
