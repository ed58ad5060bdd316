"""Refits of a real engine in this process: what it samples afterwards, and what it refuses."""

import contextlib
import sys
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))

from vllm_families import MODELS
from vllm_refit_support import (
    CONFIG,
    MODEL,
    export_of,
    refit,
    reusing,
    specs_of,
    with_buckets,
)

from rlcore.spi import ChannelProvider, NamedTensor, RefitError, WeightBucket, installed_channels, tensor_digest
from rlcore_torchkit.testing.models import make_model

pytest.importorskip("vllm")

from vllm_refitted import Refitted

from rlcore_vllm.refit.transfer import Transfer
from rlcore_vllm.setup.settings import engine_settings


@pytest.fixture(scope="module", params=MODELS)
def engine(request, tmp_path_factory):
    architecture, tied = MODELS[request.param]
    directory = make_model(tmp_path_factory.mktemp("refit") / request.param, architecture, tied=tied, **MODEL)
    with contextlib.closing(Refitted(directory)) as refitted:
        yield refitted


def test_each_of_several_refits_counts(engine):
    for version, persistent in enumerate((False, True, False)):
        tensors = engine.weights(version)
        digests = engine.refit(export_of(tensors, version, persistent=persistent))
        assert digests == {name: tensor_digest(tensor.numpy()) for name, tensor in tensors.items()}
        engine.assert_holds(version, *range(version))


def test_weights_of_nan_leave_nothing_behind(engine):
    engine.spoil(4)
    engine.refit(export_of(engine.weights(5), 5))
    engine.assert_holds(5)


def test_the_senders_buffer_may_be_reused(engine):
    export = export_of(engine.weights(10), 10)
    engine.refit(with_buckets(export, reusing(export.buckets)))
    engine.assert_holds(10)


SAVED_BUCKETS = """
import os
import tempfile

import torch

from rlcore import spi


class Sender(spi.ChannelSender):
    def connect(self, places):
        return [{"answer": 42} for _ in {place.replica for place in places}]

    def put(self, index, tensors):
        descriptor, file = tempfile.mkstemp()
        os.close(descriptor)
        torch.save(list(tensors), file)
        return {"file": file}


class Receiver(spi.ChannelReceiver):
    def receive(self, where, specs):
        assert self.options == {"answer": 42}
        tensors = torch.load(where["file"])
        os.unlink(where["file"])
        return spi.ReceivedBucket(tensors=tensors, stable=True)
"""


def test_a_channel_is_a_description_and_two_classes(engine, tmp_path, monkeypatch):
    """Neither the driver's choice nor the engine knows it otherwise."""
    provider = ChannelProvider(
        name="saved_buckets",
        spi=(2, 0),
        cost=5,
        devices={"cpu"},
        reach="process",
        sender="saved_buckets:Sender",
        receiver="saved_buckets:Receiver",
    )
    monkeypatch.setitem(installed_channels(), "saved_buckets", provider)
    (tmp_path / "saved_buckets.py").write_text(SAVED_BUCKETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    context = evolve(engine.context, channel="saved_buckets")
    assert engine_settings(context, CONFIG) == engine_settings(engine.context, CONFIG)
    engine.transfer.close()  # its receivers are replaced by those of the other channel
    transfer = Transfer(channel="saved_buckets", replicas=[engine.replica], context=context, config=CONFIG)
    with contextlib.closing(transfer):
        refit([engine.replica], transfer, export_of(engine.weights(12), 12))
    engine.assert_holds(12)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["saved_buckets.py"]


def test_one_bucket_in_reverse_order(engine):
    tensors = dict(reversed(engine.weights(11).items()))
    engine.refit(export_of(tensors, 11, bucket_bytes=2**30))
    engine.assert_holds(11)


def spoilt(bucket):
    first, *rest = bucket.tensors
    return WeightBucket(tensors=(evolve(first, tensor=first.tensor + 1e-3), *rest))


def edited(export, number, edit):
    """Its buckets with one of them replaced by what `edit` makes of it, by none, or by several."""
    for index, bucket in enumerate(list(export.buckets)):
        yield from edit(bucket) if index == number else [bucket]


FAULTS = {
    "changed on the way": lambda bucket: [spoilt(bucket)],
    "missing from the buckets": lambda bucket: [WeightBucket(tensors=bucket.tensors[1:])] if bucket.tensors[1:] else [],
    "repeated": lambda bucket: [bucket, bucket],
}


@pytest.mark.parametrize("problem", FAULTS)
@pytest.mark.parametrize("number", [0, 3])
def test_a_faulty_bucket_is_refused_by_name(engine, problem, number):
    export = export_of(engine.weights(20), 20)
    buckets = list(export.buckets)
    name = buckets[number].tensors[0].name
    with pytest.raises(RefitError, match=f"{problem}.*{name}"):
        engine.refit(with_buckets(export, edited(with_buckets(export, buckets), number, FAULTS[problem])))
    engine.refit(export_of(engine.weights(21), 21))
    engine.assert_holds(21, 20)


def test_an_unannounced_tensor_is_refused(engine):
    tensors = engine.weights(22)
    extra = NamedTensor(name="model.extra.weight", tensor=torch.zeros(3), digest=0)
    export = export_of(tensors, 22)
    with pytest.raises(RefitError, match="not announced: model.extra.weight"):
        engine.refit(with_buckets(export, [WeightBucket(tensors=(extra,)), *export.buckets]))


def changed_specs(tensors, name, change):
    specs = specs_of(tensors)
    return tuple(replacement for spec in specs for replacement in (change(spec) if spec.name == name else [spec]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: [], "missing from what the trainer exports: {name}"),
        (lambda spec: [spec, spec], "listed more than once by the trainer: {name}"),
        (lambda spec: [spec, evolve(spec, name="other.weight")], "unknown to the model: other.weight"),
        (lambda spec: [evolve(spec, shape=(7, 7))], r"{name} has shape \[7, 7\]; expected \[64, 64\]"),
        (lambda spec: [evolve(spec, dtype="float16")], "{name} is exported in float16; expected float32"),
    ],
)
def test_a_wrong_manifest_is_refused_before_anything_is_touched(engine, change, message):
    engine.refit(export_of(engine.weights(30), 30))
    tensors = engine.weights(31)
    name = "model.layers.0.self_attn.q_proj.weight"
    for _ in range(2):
        export = evolve(export_of(tensors, 31), specs=changed_specs(tensors, name, change))
        with pytest.raises(RefitError, match=message.format(name=name)):
            engine.refit(export)
    engine.assert_holds(30, 31)


@pytest.mark.parametrize("changed", [torch.zeros(2, 2), torch.zeros(64, 64, dtype=torch.float16)])
def test_a_tensor_unlike_its_announcement_is_refused(engine, changed):
    tensors = engine.weights(32)
    name = "model.layers.1.self_attn.q_proj.weight"
    export = evolve(export_of(tensors | {name: changed}, 32), specs=specs_of(tensors))
    with pytest.raises(RefitError, match=f"{name}: found .*; expected .* of float32"):
        engine.refit(export)


def test_no_weights_at_all_are_refused(engine):
    export = export_of(engine.weights(33), 33)
    with pytest.raises(RefitError, match="exported no weights"):
        engine.refit(with_buckets(export, []))


@pytest.mark.parametrize(
    "left_out",
    ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight", "model.norm.weight"],
)
def test_what_the_loader_lacks_is_named(engine, left_out):
    """Without the manifest's check: vLLM itself would keep old weights, or process half a layer, and say nothing."""
    weights = engine.weights(40)
    del weights[left_out]

    def load(worker):
        loader = worker.weight_transfer_engine.loader
        loader.begin()
        loader.load(weights.items(), stable=True)
        try:
            loader.finish()
        except RefitError as error:
            loader.abandon()
            return str(error)

    (message,) = engine.replica.engine.call_workers(load, {}).result()
    layer = left_out.removesuffix(".weight").replace("k_proj", "qkv_proj")
    assert layer in message
    engine.refit(export_of(engine.weights(41), 41))
    engine.assert_holds(41)


def weak_references(worker):
    """To the model, by an empty name, and to its parameters."""
    model = worker.get_model()
    return {name: weakref.ref(each) for name, each in (("", model), *model.named_parameters())}


def test_a_restart_lets_the_old_model_go(engine):
    """On GPUs, vLLM's allocator takes no second engine in a process before the first one's weights are freed."""
    engine.refit(export_of(engine.weights(50), 50))
    (kept,) = engine.replica.call_workers(weak_references, {}).result()
    export = export_of(engine.weights(51), 51)
    with pytest.raises(RefitError) as refused:  # held to the end, as by whoever reports it
        engine.refit(with_buckets(export, list(export.buckets)[1:]))
    engine.transfer.close()
    engine.replica.restart()
    assert [name for name, reference in kept.items() if reference() is not None] == []
    engine.refit(export_of(engine.weights(52), 52))
    engine.assert_holds(52, 50)
    assert "missing from the buckets" in str(refused.value)
