"""A mixture of experts whose routers are told where tokens go: batches, and what plain transformers makes of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from fsdp2_support import TEMPERATURE, Reference, make_batch, split, step_request
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.spi import ROUTED_EXPERTS, LogprobsRequest, TokenBatch
from rlcore_torchkit.testing.models import make_model

NUM_LAYERS, NUM_EXPERTS, TOP_K, DENSE_LAYER = 4, 4, 2, 1
NUM_SEQUENCES = 8
BOUND = 1e-5


def make_mixed_model(directory: Path, dense_layers: Sequence[int] = (DENSE_LAYER,), **options: Any) -> Path:
    """With experts in all layers but some; `options` of `make_model`."""
    make_model(directory, "qwen3_moe", num_layers=NUM_LAYERS, tied=False, **options)
    config = AutoConfig.from_pretrained(directory)
    config.mlp_only_layers, config.norm_topk_prob = list(dense_layers), False
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def expected_of(reference: Reference) -> dict[str, Any]:
    """Log-probabilities with and without the routing, and the loss of a step with it; its gradients the reference then has."""
    batch = routed_batch()
    with torch.no_grad():
        own = reference.logprobs(batch)
        with forced(reference.model, batch):
            logprobs = reference.logprobs(batch)
    assert (own[0] - logprobs[0]).abs().max() > 1000 * BOUND
    with forced(reference.model, batch) as agreement:
        loss = reference.backward(batch)
    return {"logprobs": logprobs, "own": own, "loss": loss, "agreement": float(np.mean(agreement))}


def routed_batch() -> TokenBatch:
    """With different experts at random for most tokens; the others are left to the routers."""
    batch = make_batch(seed=3, num_sequences=NUM_SEQUENCES, max_length=11)
    random = np.random.default_rng(3)
    experts = random.random((batch.num_tokens, NUM_LAYERS, NUM_EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int16)
    experts[random.random(batch.num_tokens) < 0.2] = -1
    experts[:, DENSE_LAYER] = -1
    return batch.with_token_column(ROUTED_EXPERTS, experts)


@contextmanager
def forced(model: Any, batch: TokenBatch) -> Iterator[list[bool]]:
    """Sequences of `batch`, run one by one, go where their column says. Yields whether the routers would have chosen each of
    the experts that they are told to."""
    alike: list[bool] = []
    columns = np.split(batch.token_columns[ROUTED_EXPERTS], batch.offsets[1:-1])
    starts = [tuple(tokens.tolist()) for tokens in np.split(batch.tokens, batch.offsets[1:-1])]
    routed = dict(zip(starts, columns, strict=True))
    current: list[np.ndarray] = []

    def begin(_: Any, __: Any, options: Mapping[str, Any]) -> None:
        current[:] = [routed[tuple(options["input_ids"][0].tolist())]]

    def replace(layer: int, output: Any) -> Any:
        logits, _, own = output
        given = torch.from_numpy(current[0][:, layer]).long()
        known = given >= 0
        alike.extend((given[..., None] == own[:, None]).any(-1)[known].tolist())
        chosen = torch.where(known, given, own)
        return logits, logits.softmax(-1).gather(1, chosen), chosen

    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    for index, layer in enumerate(model.model.layers):
        if index != DENSE_LAYER:
            hooks.append(layer.mlp.gate.register_forward_hook(lambda _, __, output, index=index: replace(index, output)))
    try:
        yield alike
    finally:
        for hook in hooks:
            hook.remove()


def parts_of(batch: TokenBatch, backend: Any, form: str) -> tuple[TokenBatch, ...]:
    """The microbatches of a data-parallel rank."""
    mine = sequences_of(backend)
    return split(batch, [mine[:1], mine[1:]] if form == "packed" else [[sequence] for sequence in mine])


def sequences_of(backend: Any) -> Sequence[int]:
    return range(backend.layout.data_parallel_rank, NUM_SEQUENCES, backend.layout.data_parallel_size)


def check_logprobs(backend: Any, batch: TokenBatch, expected: Any, form: str) -> None:
    places = np.concatenate([np.arange(batch.offsets[n], batch.offsets[n + 1]) for n in sequences_of(backend)])
    parts = parts_of(batch, backend, form)
    request = LogprobsRequest(microbatches=parts, model="policy", temperature=TEMPERATURE, entropy=True, weight_version=0)
    result = backend.get_logprobs(request)
    for found, wanted in zip((result.logprobs, result.entropy), expected, strict=True):
        np.testing.assert_allclose(np.concatenate(found), wanted.numpy()[places], atol=BOUND)


def check_step(backend: Any, expected: Mapping[str, Any], form: str) -> None:
    """Log-probabilities, and figures of a step, are those of the routing given; none is left over for a batch without."""
    batch = routed_batch()
    check_logprobs(backend, batch, expected["logprobs"], form)
    check_logprobs(backend, without_columns(batch), expected["own"], form)
    result = backend.train_step(step_request(parts_of(batch, backend, form), batch.counts()))
    assert abs(result.loss - expected["loss"]) < BOUND
    assert abs(result.metrics["routing_agreement"] - expected["agreement"]) < BOUND


def without_columns(batch: TokenBatch) -> TokenBatch:
    return evolve(batch, token_columns={})
