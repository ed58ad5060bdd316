"""Refits by the channel shards of engines of two ranks, each of which is sent what it reads once that is known."""

import contextlib
import os
import string
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "fsdp2_backend"))

from decoder_families import TRAINED, make_family
from vllm_refit_support import (
    BUCKET_BYTES,
    CONFIG,
    MODEL,
    TOLERANCE,
    checkpoint,
    context_of,
    export_of,
    greatest_error,
    policy,
    refit,
    sample,
    specs_of,
)

from rlcore.spi import ExportWeightsRequest, RefitError
from rlcore_torchkit.refit.digest import tensor_digests
from rlcore_torchkit.refit.shard_group import ProcessShardGroup
from rlcore_torchkit.refit.shard_route import whole_slice
from rlcore_torchkit.refit.shard_sender import ShardSender
from rlcore_torchkit.testing.models import make_model

pytest.importorskip("vllm")

from rlcore_vllm.refit.transfer import Transfer
from rlcore_vllm.replicas.process import ProcessReplica
from rlcore_vllm.setup.settings import engine_settings

from .conftest import look_at

CPU = torch.device("cpu")
ENGINE = {"worker_extension_cls": "vllm_plain_weights.PlainWeights"}
TWO_RANKS = evolve(CONFIG, tensor_parallel=2, engine=ENGINE)
EVEN = string.ascii_letters + string.digits
"""Of so many characters that vLLM pads the vocabulary with nothing."""


class Trial:
    """A trainer of one rank, which holds whole tensors, and an engine."""

    def __init__(self, folder, model, config, stack):
        """`folder` is for logs, `model` a directory."""
        self.folder, self.config = model, config
        self.context = context_of(self.folder, "shards")
        self.replica = ProcessReplica("vllm-0", engine_settings(self.context, config), (), config, folder)
        stack.callback(self.replica.close)
        self.replica.start()
        self.sender = ShardSender(0, 1, CPU)
        stack.callback(self.sender.close)
        self.transfer = self.transfer_over("shards")
        stack.callback(lambda: self.transfer.close())

    def transfer_over(self, channel):
        return Transfer(channel=channel, replicas=[self.replica], context=self.context, config=self.config)

    def weights(self, version):
        return checkpoint(policy(self.folder, version))

    def refit(self, version, delta="off", tensors=None):
        """Bytes that each rank has received; the sum of digests is the trainer's."""
        tensors = self.weights(version) if tensors is None else tensors
        specs = specs_of(tensors)
        request = ExportWeightsRequest(
            weight_version=version, dtype="float32", max_bucket_bytes=BUCKET_BYTES, sharded=True, delta=delta
        )
        export = self.sender.export(
            request,
            specs,
            list(map(whole_slice, specs)),
            lambda window: {whole_slice(spec): tensors[spec.name] for spec in window},
        )
        self.replica.begin_update().result()
        try:
            assert self.transfer.take_shards(export, export.shards, holds_weights=True) == export.shards.digest
        finally:
            self.replica.end_update({0: version}).result()
        return self.call("received_bytes")

    def held(self):
        return self.call("parameter_digests")

    def held_of_loaders(self, version, tensors=None):
        """What vLLM's loaders make of whole tensors."""
        self.call("forget")
        transfer = self.transfer_over("shared_memory")
        with contextlib.closing(transfer):
            refit([self.replica], transfer, export_of(self.weights(version) if tensors is None else tensors, version))
        return self.held()

    def call(self, name):
        return self.replica.call_workers(f"refit_test_{name}", {}).result()


@pytest.fixture
def trial_of(tmp_path, torchao_imported):
    """A function (architecture, the engine's config, sizes of the model) -> Trial."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)

        def make(architecture, config=TWO_RANKS, **sizes):
            if architecture in TRAINED:
                model = make_family(tmp_path / "model", architecture, {**TRAINED[architecture], **sizes})
            else:
                model = make_model(tmp_path / "model", architecture, **{**MODEL, "alphabet": EVEN, **sizes})
            look_at(model, torchao_imported)
            return Trial(tmp_path, model, config, stack)

        yield make


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.wide  # test_transfer_processes.py takes parts on two ranks, channels/test_shards.py counts bytes without engines
@pytest.mark.parametrize(
    ("architecture", "changes", "share"),
    [
        ("llama", {"tied": True}, 0.53),
        ("qwen3", {"tied": False}, 0.53),
        ("qwen3", {"num_kv_heads": 1, "head_dim": 32}, 0.6),
        ("qwen2", {"alphabet": string.ascii_lowercase}, 0.62),
    ],
    ids=[
        "tied",
        "output layer of its own",
        "a head of keys that both ranks have",
        "a vocabulary that the second rank has none of",
    ],
)
def test_each_rank_gets_what_it_reads(architecture, changes, share, trial_of):
    trial = trial_of(architecture, **changes)
    whole = bytes_of(trial.weights(0))
    received = [trial.refit(version) for version in range(3)]
    assert min(received[0]) > whole
    assert received[1] == received[2]
    assert max(received[1]) < share * whole
    assert greatest_error(policy(trial.folder, 2), sample(trial.replica, 2)) < TOLERANCE
    held = trial.held()
    assert held == trial.held_of_loaders(2)
    assert held != trial.held_of_loaders(1)


@pytest.mark.wide  # below ranks have parts of experts, and hold what loaders make of whole ones
@pytest.mark.parametrize("parallel", [False, True], ids=["a part of each", "its own"])
def test_each_rank_gets_of_experts_what_it_reads(parallel, trial_of):
    config = evolve(TWO_RANKS, engine={**ENGINE, "enable_expert_parallel": parallel})
    trial = trial_of("qwen3_moe", config)
    whole = bytes_of(trial.weights(0))
    received = [trial.refit(version) for version in range(3)]
    assert min(received[0]) > whole
    assert received[1] == received[2]
    assert max(received[1]) < 0.55 * whole
    held = trial.held()
    assert held == trial.held_of_loaders(2)
    assert held != trial.held_of_loaders(1)


@pytest.mark.wide  # channels/test_shards.py sends changes alone, without engines
def test_changes_alone_come_of_what_a_rank_reads(trial_of):
    trial, generator = trial_of("qwen3"), torch.Generator().manual_seed(0)
    tensors, received = trial.weights(0), []
    whole = bytes_of(tensors)
    for version in range(4):
        received.append(trial.refit(version, "device", tensors))
        for tensor in tensors.values():
            tensor[torch.rand(tensor.shape, generator=generator) < 0.01] *= 1.5
    assert min(received[0]) > whole
    assert 0.4 * whole < max(received[1]) < 0.53 * whole, "the copies of the first are of other parts"
    assert max(*received[2], *received[3]) < 0.04 * whole


@pytest.mark.wide  # tests/torchkit/test_shard_sender_delta.py has new receivers
def test_an_engine_that_was_started_anew_gets_everything_and_then_what_it_reads(trial_of):
    trial = trial_of("qwen3")
    whole = bytes_of(trial.weights(0))
    received = [trial.refit(version) for version in range(2)]
    trial.transfer.close()
    trial.replica.restart()
    received += [trial.refit(version) for version in range(2, 5)]
    assert [min(each) > whole for each in received] == [True, False, True, False, False]
    assert received[1] == received[3] == received[4]
    assert trial.held() == trial.held_of_loaders(4)


@pytest.mark.wide  # channels/test_shards.py has the same, without engines
def test_a_part_that_changed_on_the_way_is_not_loaded(trial_of, monkeypatch):
    """And the refit after it brings what is read again."""
    trial, exchange = trial_of("qwen3"), ProcessShardGroup.exchange
    received = [trial.refit(version) for version in range(2)]

    def changed(group, sent, received):
        for peer, message in sent:
            if peer == 2:  # the engine's second rank
                message[0] ^= 1
        exchange(group, sent, received)

    with monkeypatch.context() as patch:
        patch.setattr(ProcessShardGroup, "exchange", changed)
        with pytest.raises(RefitError, match="changed on the way"):
            trial.refit(2)
    assert trial.refit(3) == received[1]
    assert trial.held() == trial.held_of_loaders(3)


def test_loaders_write_to_copies_of_what_comes(trial_of):
    """In gpt-oss those of the second rank set biases to zero that the first one adds. So would each that both read from one
    memory, and each to which the next changes are relative."""
    trial = trial_of("gpt_oss", hidden_size=64, num_attention_heads=2, head_dim=32)
    tensors, generator = trial.weights(0), torch.Generator().manual_seed(0)
    biases = [tensors[name].normal_(generator=generator) for name in tensors if name.endswith("down_proj_bias")]
    for version in range(4):
        trial.refit(version, "device", tensors)
        assert trial.call("keeps_its_sinks") == [[True, True], [True, True]]
        for tensor in tensors.values():
            tensor[torch.rand(tensor.shape, generator=generator) < 0.02] += 0.1
    trial.refit(4, "device", tensors)
    held = trial.held()
    for _ in range(4):
        assert trial.held_of_loaders(4, tensors) == held
    names = [f"model.layers.{layer}.mlp.experts.routed_experts.w2_bias" for layer in range(2)]
    assert [held[0][name] for name in names] == tensor_digests(biases)
    assert [held[1][name] for name in names] == tensor_digests(map(torch.zeros_like, biases))
