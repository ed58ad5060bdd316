"""Small models in several versions, their exports, and plain forward passes to compare an engine's log-probabilities with."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from attrs import evolve
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from rlcore.spi import (
    GenerateRequest,
    GeneratorContext,
    ModelSpec,
    NamedTensor,
    RaggedTokens,
    RankInfo,
    SamplingParams,
    TensorSpec,
    WeightBucket,
    WeightExport,
)
from rlcore_torchkit.refit.digest import make_buckets
from rlcore_vllm.replicas.request_dispatch import dispatch
from rlcore_vllm.setup.config import VllmConfig

MODEL = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 2}
"""Heads of 32, which vLLM's attention on CPU takes, and two of them, for two ranks."""
CONFIG = VllmConfig(cpu_kv_cache_gib=0.1, max_num_seqs=8, refit_timeout_s=600.0)
BUCKET_BYTES = 40_000
"""Less than a layer, so that layers are never whole when a bucket ends."""
TOLERANCE = 1e-4
PROMPTS = RaggedTokens.from_lists([[5, 6, 7], [9, 10, 11, 12], [20]])


def context_of(directory, channel, device="cpu", dtype="float32"):
    model = ModelSpec(path=str(directory), dtype=dtype)
    return GeneratorContext(model=model, rank_info=RankInfo(device=device), seed=0, max_sequence_length=128, channel=channel)


def policy(directory, version):
    """The model of a directory with other random weights for each version."""
    config = AutoConfig.from_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(version)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def checkpoint(model, device="cpu", dtype=torch.float32):
    """Hugging Face name to tensor, as a trainer exports it."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    return {name: tensor.to(device, dtype).clone() for name, tensor in revert_weight_conversion(model, state).items()}


def not_finite(tensors):
    """The tensors with NaN for each value."""
    return {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}


def specs_of(tensors):
    return tuple(
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )


def export_of(tensors, version, *, persistent=False, bucket_bytes=BUCKET_BYTES):
    return WeightExport(
        weight_version=version,
        specs=specs_of(tensors),
        buckets=make_buckets(tensors.items(), bucket_bytes),
        persistent=persistent,
    )


def with_buckets(export, buckets: Iterable[WeightBucket]):
    return evolve(export, buckets=iter(buckets))


def reusing(buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
    """The same buckets from one buffer, which holds NaN as soon as the next one is asked for."""
    for bucket in buckets:
        own = tuple(NamedTensor(name=named.name, tensor=named.tensor.clone(), digest=named.digest) for named in bucket.tensors)
        yield WeightBucket(tensors=own)
        for named in own:
            named.tensor.fill_(float("nan"))


def refit(replicas: Sequence, transfer, export):
    """As the backend does it."""
    for replica in replicas:
        replica.begin_update().result()
    try:
        return transfer.send(export)
    finally:
        for replica in replicas:
            replica.end_update({0: export.weight_version}).result()


def begin_samples(replica, version, *, num_samples=1, max_tokens=12, sampling=None, masked=False):
    """The call's future, and a list that its samples come into as they end; `max_tokens` of all, or of each."""
    total = PROMPTS.num_sequences * num_samples
    request = GenerateRequest(
        prompts=PROMPTS,
        num_samples=num_samples,
        seeds=np.arange(total),
        max_tokens=np.broadcast_to(np.array(max_tokens, np.int32), total).copy(),
        sampling=sampling or SamplingParams(),
        weight_version=version,
        sampling_mask=masked,
    )
    finished = []
    return replica.generate(dispatch(request, request.max_tokens, [0])[0], finished.extend), finished


def finished_samples(replica, version, **options):
    """All samples, as they are delivered."""
    done, finished = begin_samples(replica, version, **options)
    done.result()
    return finished


def texts_of(finished, num_samples=1):
    """Prompt tokens, response tokens and log-probabilities of each sample, so many of a prompt."""
    return [(PROMPTS.sequence(each.number // num_samples).tolist(), each.tokens.tolist(), each.logprobs) for each in finished]


def sample(replica, version, *, num_samples=1, **options):
    """As `texts_of`."""
    return texts_of(finished_samples(replica, version, num_samples=num_samples, **options), num_samples)


def errors(model, samples):
    """Of the samples' log-probabilities against a plain forward pass, float32 [T]."""
    found = []
    for prompt, response, logprobs in samples:
        tokens = torch.tensor([prompt + response], device=model.device)
        with torch.no_grad():
            expected = model(tokens).logits[0].float().log_softmax(-1).cpu()
        places = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        found.append(np.abs(expected[places, torch.tensor(response)].numpy() - logprobs))
    return np.concatenate(found)


def greatest_error(model, samples):
    return float(errors(model, samples).max())
