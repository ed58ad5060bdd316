"""Refit: what the generator holds is what was exported, or it refuses to generate."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from attrs import evolve

from rlcore.registry.binding import build_generator
from rlcore.registry.discovery import Registry
from rlcore.spi import (
    ContractError,
    GeneratorContext,
    ModelSpec,
    RankInfo,
    RefitError,
    SetResidencyRequest,
    WeightBucket,
)
from rlcore_torchkit.huggingface.models import checkpoint_shapes, load_model
from rlcore_transformers.config import TransformersConfig
from rlcore_transformers.provider import PROVIDER
from rlcore_transformers.weights import HeldWeights


@dataclass
class Pair:
    """Two sets of weights for one architecture."""

    old: object
    new: object


@pytest.fixture(params=["qwen3", "qwen3_moe", "llama"])
def pair(request, checkpoint):
    tied = request.param == "qwen3"
    return Pair(checkpoint(request.param, seed=0, tied=tied), checkpoint(request.param, seed=1, tied=tied))


def sampled_logprob_error(tools, backend, directory, version):
    """Largest difference between the generator's log-probabilities and transformers' with the directory's weights."""
    prompt = [2, 3, 4]
    result = backend.generate(tools.make_request([prompt], num_samples=4, max_tokens=10, version=version))
    worst = 0.0
    for response, found in zip(tools.split(result), tools.split(result, "logprobs"), strict=True):
        logits = tools.reference_logits(directory, prompt + response)[len(prompt) - 1 : -1]
        expected = tools.log_softmax(logits)[range(len(response)), response]
        worst = max(worst, np.abs(expected - found).max())
    return worst


@pytest.mark.parametrize("may_alias", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_every_refit_brings_the_new_weights(tools, pair, may_alias, persistent):
    backend = tools.make_backend(pair.old)
    assert sampled_logprob_error(tools, backend, pair.old, 0) < 1e-5
    assert sampled_logprob_error(tools, backend, pair.new, 0) > 0.1
    for version, directory, other in ((1, pair.new, pair.old), (2, pair.old, pair.new), (3, pair.new, pair.old)):
        tensors = tools.checkpoint_tensors(directory)
        digests = tools.refit(backend, tools.make_export(tensors, version=version, persistent=persistent), may_alias=may_alias)
        assert digests == {name: tools.digest_of(tensor) for name, tensor in tensors.items()}
        assert sampled_logprob_error(tools, backend, directory, version) < 1e-5
        assert sampled_logprob_error(tools, backend, other, version) > 0.1


def test_an_aliased_refit_keeps_the_trainers_tensors_themselves(tools, pair):
    backend = tools.make_backend(pair.old)
    tensors = tools.checkpoint_tensors(pair.old)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    tools.refit(backend, tools.make_export(parameters, version=1, persistent=True), may_alias=True)
    with torch.no_grad():
        for name, tensor in tools.checkpoint_tensors(pair.new).items():
            parameters[name].copy_(tensor)
    assert sampled_logprob_error(tools, backend, pair.new, 1) < 1e-5
    assert all(parameter.requires_grad for parameter in parameters.values())


def test_aliased_parameters_can_be_trained_after_generating(tools, qwen3):
    backend = tools.make_backend(qwen3, fill=False)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tools.checkpoint_tensors(qwen3).items()}
    tools.refit(backend, tools.make_export(parameters, version=0, persistent=True), may_alias=True)
    backend.generate(tools.make_request([[2, 3]]))
    loss = sum((parameter * parameter).sum() for parameter in parameters.values())
    loss.backward()
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(parameter.grad, alpha=-0.1)
    backend.generate(tools.make_request([[2, 3]]))


@pytest.mark.parametrize(("may_alias", "persistent"), [(False, True), (True, False), (False, False)])
def test_a_copying_refit_never_touches_or_keeps_the_trainers_tensors(tools, pair, may_alias, persistent):
    backend = tools.make_backend(pair.old, fill=False)
    aliased = tools.checkpoint_tensors(pair.old)
    tools.refit(backend, tools.make_export(aliased, version=0, persistent=True), may_alias=True)
    tensors = tools.checkpoint_tensors(pair.new)
    tools.refit(backend, tools.make_export(tensors, version=1, persistent=persistent), may_alias=may_alias)
    for name, tensor in tools.checkpoint_tensors(pair.old).items():
        assert torch.equal(aliased[name], tensor)
    for tensor in tensors.values():
        tensor.zero_()
    assert sampled_logprob_error(tools, backend, pair.new, 1) < 1e-5


def test_buckets_that_reuse_one_buffer_are_copied_in_time(tools, qwen3):
    backend = tools.make_backend(qwen3, fill=False)
    tensors = tools.checkpoint_tensors(qwen3)
    export = tools.make_export(tensors, num_buckets=len(tensors))
    buffer = torch.empty(max(tensor.numel() for tensor in tensors.values()))

    def reuse(buckets):
        for bucket in buckets:
            (named,) = bucket.tensors
            view = buffer[: named.tensor.numel()].view(named.tensor.shape)
            view.copy_(named.tensor)
            yield WeightBucket(tensors=(evolve(named, tensor=view),))

    tools.refit(backend, evolve(export, buckets=reuse(export.buckets)))
    assert sampled_logprob_error(tools, backend, qwen3, 0) < 1e-5


def test_another_dtype_is_cast_and_acknowledged_as_it_arrived(tools, qwen3):
    backend = tools.make_backend(qwen3, dtype="bfloat16", fill=False)
    tensors = tools.checkpoint_tensors(qwen3)
    digests = tools.refit(backend, tools.make_export(tensors, persistent=True), may_alias=True)
    assert digests == {name: tools.digest_of(tensor) for name, tensor in tensors.items()}
    held = backend.set_residency(SetResidencyRequest(weights="device", state="device"))
    assert held.device_bytes == 2 * sum(tensor.numel() for tensor in tensors.values()), "2 bytes each in bfloat16"
    assert sampled_logprob_error(tools, backend, qwen3, 0) < 0.5


def test_numpy_tensors_are_taken(tools, qwen3):
    backend = tools.make_backend(qwen3, fill=False)
    export = tools.make_export(tools.checkpoint_tensors(qwen3))
    buckets = [
        WeightBucket(tensors=tuple(evolve(named, tensor=named.tensor.numpy()) for named in bucket.tensors))
        for bucket in export.buckets
    ]
    tools.refit(backend, evolve(export, buckets=iter(buckets)))
    assert sampled_logprob_error(tools, backend, qwen3, 0) < 1e-5


NAME = "model.layers.1.self_attn.k_proj.weight"
OTHER = "model.layers.0.self_attn.k_proj.weight"


def corrupt(tensors, export):
    tensors[NAME][3, 5] += 1.0


def swap_two_rows(tensors, export):
    tensors[NAME][[0, 1]] = tensors[NAME][[1, 0]]


def drop_from_the_buckets(tensors, export):
    return evolve(export, buckets=iter(keep(export, lambda named: named.name != NAME)))


def drop_from_everything(tensors, export):
    specs = tuple(spec for spec in export.specs if spec.name != NAME)
    return evolve(export, specs=specs, buckets=iter(keep(export, lambda named: named.name != NAME)))


def repeat(tensors, export):
    buckets = list(export.buckets)
    return evolve(export, buckets=iter([*buckets, buckets[0]]))


def list_twice(tensors, export):
    return evolve(export, specs=(*export.specs, export.specs[0]))


def rename(tensors, export):
    buckets = [
        WeightBucket(tensors=tuple(evolve(named, name=named.name.replace(NAME, "model.other")) for named in bucket.tensors))
        for bucket in export.buckets
    ]
    return evolve(export, buckets=iter(buckets))


def list_unknown(tensors, export):
    return evolve(export, specs=(*export.specs, evolve(export.specs[0], name="model.other")))


def put_under_another_name(tensors, export):
    names = {NAME: OTHER, OTHER: NAME}
    buckets = [
        WeightBucket(
            tensors=tuple(evolve(n, tensor=tensors[names.get(n.name, n.name)], digest=n.digest) for n in bucket.tensors)
        )
        for bucket in export.buckets
    ]
    return evolve(export, buckets=iter(buckets))


def transpose(tensors, export):
    buckets = [
        WeightBucket(
            tensors=tuple(evolve(n, tensor=n.tensor.t().contiguous()) if n.name == NAME else n for n in bucket.tensors)
        )
        for bucket in export.buckets
    ]
    return evolve(export, buckets=iter(buckets))


def keep(export, predicate):
    return [WeightBucket(tensors=tuple(filter(predicate, bucket.tensors))) for bucket in export.buckets]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (corrupt, "changed on the way.*k_proj"),
        (swap_two_rows, "changed on the way.*k_proj"),
        (put_under_another_name, "2 tensor.*changed on the way"),
        (drop_from_the_buckets, "missing from the buckets: model.layers.1"),
        (drop_from_everything, "missing from what the trainer exports: model.layers.1"),
        (repeat, "repeated"),
        (list_twice, "listed more than once"),
        (rename, "unknown to the model: model.other"),
        (list_unknown, "unknown to the model: model.other"),
        (transpose, r"k_proj.weight has shape \[32, 16\]; expected \[16, 32\]"),
    ],
)
@pytest.mark.parametrize("may_alias", [False, True])
def test_a_refit_that_did_not_happen_is_an_error(tools, qwen3, damage, message, may_alias):
    tensors = tools.checkpoint_tensors(qwen3)
    held = HeldWeights({name: tuple(tensor.shape) for name, tensor in tensors.items()}, torch.float32, torch.device("cpu"))
    held.receive(tools.make_export(tensors, persistent=True), may_alias)
    damaged = tools.checkpoint_tensors(qwen3)
    export = tools.make_export(damaged, version=1, persistent=True)
    export = damage(damaged, export) or export
    with pytest.raises(RefitError, match=message):
        held.receive(export, may_alias)
    assert held.tensors == {}
    tensors = tools.checkpoint_tensors(qwen3)
    held.receive(tools.make_export(tensors, version=2), may_alias)
    assert held.tensors.keys() == tensors.keys()
    assert all(torch.equal(held.tensors[name], tensor) for name, tensor in tensors.items())


@pytest.fixture
def handle(qwen3):
    """A generator as the loop has it, in which a fresh one holds no weights."""
    (entry,) = Registry.from_providers({"generator": [PROVIDER]}).of("generator")
    model = ModelSpec(path=str(qwen3), dtype="float32")
    context = GeneratorContext(model=model, rank_info=RankInfo(), seed=0, max_sequence_length=64)
    return build_generator(entry, context, TransformersConfig())


def test_a_trainer_that_fails_midway_leaves_no_weights(tools, qwen3, handle):
    tensors = tools.checkpoint_tensors(qwen3)
    tools.refit(handle, tools.make_export(tensors))
    export = tools.make_export(tensors, version=1)

    def fail(buckets):
        yield next(buckets)
        raise RuntimeError("lost the trainer")

    with pytest.raises(RuntimeError, match="lost the trainer"):
        tools.refit(handle, evolve(export, buckets=fail(export.buckets)))
    for version in (0, 1):
        with pytest.raises(ContractError, match="no weights"):
            handle.generate(tools.make_request([[2]], version=version))
    tools.refit(handle, tools.make_export(tensors, version=2))
    assert sampled_logprob_error(tools, handle, qwen3, 2) < 1e-5


def test_another_architectures_weights_are_refused(tools, checkpoint):
    backend = tools.make_backend(checkpoint("llama", tied=False))
    with pytest.raises(RefitError, match=r"unknown to the model.*q_norm"):
        tools.refit(backend, tools.make_export(tools.checkpoint_tensors(checkpoint("qwen3", tied=False)), version=1))


def test_samples_name_the_version_that_the_last_refit_brought(tools, qwen3, handle):
    tools.refit(handle, tools.make_export(tools.checkpoint_tensors(qwen3), version=3))
    result = handle.generate(tools.make_request([[2]], version=3))
    assert set(result.weight_versions.tolist()) == {3}


def test_expected_names_are_those_of_the_checkpoint(tools, any_checkpoint):
    model = load_model(ModelSpec(path=str(any_checkpoint)), dtype=torch.float32, device="meta")
    tensors = tools.checkpoint_tensors(any_checkpoint)
    assert checkpoint_shapes(model) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
