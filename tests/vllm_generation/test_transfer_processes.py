"""Refits of an engine of two ranks in processes of their own: shared memory and files, and ranks that hang or die."""

import contextlib
import json
import os
import string
import sys
from pathlib import Path

import psutil
import pytest
import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))

from vllm_families import IN_PROCESSES
from vllm_refit_faults import FAULT_VARIABLE
from vllm_refit_support import (
    BUCKET_BYTES,
    CONFIG,
    MODEL,
    TOLERANCE,
    checkpoint,
    context_of,
    export_of,
    finished_samples,
    greatest_error,
    not_finite,
    policy,
    refit,
    reusing,
    sample,
    specs_of,
    with_buckets,
)

from rlcore.spi import ExportWeightsRequest, RefitError, SamplingParams, WorkerError, tensor_digest
from rlcore_torchkit.channels import directory, shared_memory
from rlcore_torchkit.refit.delta_encoding import encode
from rlcore_torchkit.refit.shard_route import whole_slice
from rlcore_torchkit.refit.shard_sender import ShardSender
from rlcore_torchkit.testing.models import make_model

pytest.importorskip("vllm")

from rlcore_vllm.engines.environment import omp_threads_bind
from rlcore_vllm.refit.transfer import Transfer
from rlcore_vllm.replicas.process import ProcessReplica
from rlcore_vllm.setup.settings import engine_settings

from .conftest import look_at

CPU = torch.device("cpu")
TWO_RANKS = evolve(CONFIG, tensor_parallel=2, engine={"worker_extension_cls": "vllm_refit_faults.FaultyWorkerExtension"})


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    """Tied, with so few tokens that the second rank holds none of them."""
    return make_model(
        tmp_path_factory.mktemp("refit") / "model", IN_PROCESSES, tied=True, alphabet=string.ascii_lowercase, **MODEL
    )


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory):
    return tmp_path_factory.mktemp("faults") / "fault.json"


@pytest.fixture(scope="module")
def lost():
    """What ended the engine, if anything did."""
    return []


@pytest.fixture(scope="module")
def started(model_directory, fault_file, tmp_path_factory, torchao_imported):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULT_VARIABLE, str(fault_file))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        look_at(model_directory, torchao_imported)
        settings = engine_settings(context_of(model_directory, "shared_memory"), TWO_RANKS)
        log_directory = tmp_path_factory.mktemp("log")
        with contextlib.closing(ProcessReplica("vllm-0", settings, (), TWO_RANKS, log_directory)) as engine:
            engine.start()
            yield engine


@pytest.fixture
def replica(started, lost):
    """In whatever order tests run."""
    if lost:
        lost.clear()
        started.restart()
    return started


@pytest.fixture
def transfer_over(replica, model_directory):
    """A function (channel, config) -> Transfer to the replica."""
    with contextlib.ExitStack() as stack:

        def make(channel, config=TWO_RANKS):
            context = context_of(model_directory, channel)
            made = Transfer(channel=channel, replicas=[replica], context=context, config=config)
            return stack.enter_context(contextlib.closing(made))

        yield make


@pytest.fixture
def weights(model_directory):
    return lambda version: checkpoint(policy(model_directory, version))


@pytest.fixture
def assert_holds(replica, model_directory):
    def check(version, *others):
        samples = sample(replica, version)
        assert greatest_error(policy(model_directory, version), samples) < TOLERANCE
        for other in others:
            assert greatest_error(policy(model_directory, other), samples) > 100 * TOLERANCE

    return check


@pytest.mark.parametrize("channel", ["shared_memory", "directory"])
def test_each_of_several_refits_counts(channel, replica, transfer_over, weights, assert_holds, tmp_path):
    transfer = transfer_over(channel, evolve(TWO_RANKS, refit_directory=str(tmp_path)))
    for version in range(3):
        tensors = weights(version)
        export = export_of(tensors, version)
        digests = refit([replica], transfer, with_buckets(export, reusing(export.buckets)))
        assert digests == {name: tensor_digest(tensor.numpy()) for name, tensor in tensors.items()}
        assert_holds(version, *range(version))
        assert not list(tmp_path.iterdir())


def parameter_digests(replica):
    """Of both ranks' parameters, as their kernels read them."""
    return replica.call_workers("refit_test_parameter_digests", {}).result()


def with_special_values(tensors, nan):
    """NaN of one kind or another and zeros of one sign or the other among the values, which are alike or unlike as values
    and not as bits."""
    for tensor in tensors.values():
        tensor.view(-1)[3] = 0.0 if nan & 1 else -0.0
        tensor.view(-1).view(torch.int32)[5] = nan
    return tensors


def test_changes_of_parts_come_to_what_whole_tensors_do(replica, transfer_over, weights):
    """In the form that the kernels of both ranks read; after a connection anew all parts travel again."""
    tensors, sender = weights(5), ShardSender(0, 1, CPU)
    specs = specs_of(tensors)
    generator, sent = torch.Generator().manual_seed(0), []

    def take(transfer, version):
        request = ExportWeightsRequest(
            weight_version=version, dtype="float32", max_bucket_bytes=BUCKET_BYTES, sharded=True, delta="device"
        )

        def read(window):
            return {whole_slice(spec): tensors[spec.name] for spec in window}

        export = sender.export(request, specs, list(map(whole_slice, specs)), read)
        replica.begin_update().result()
        assert transfer.take_shards(export, export.shards, holds_weights=True) == export.shards.digest
        replica.end_update({0: version}).result()
        sent.append(export.shards.sent_bytes)

    transfer = transfer_over("shards")
    for version in range(5, 8):
        with_special_values(tensors, 0x7FC00000 + version)
        take(transfer, version)
        for tensor in tensors.values():
            chosen = torch.rand(tensor.shape, generator=generator) < 0.01
            tensor[chosen] *= 1.5
    transfer.close()
    take(transfer, 8)
    held = parameter_digests(replica)
    refit([replica], transfer_over("shared_memory"), export_of(tensors, 9))
    assert parameter_digests(replica) == held
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert [whole < share < 1.1 * whole for share in sent] == [True, False, False, True]
    assert max(sent[1:3]) < 0.04 * whole
    sender.close()


def test_changes_in_files_come_to_what_whole_tensors_do(replica, transfer_over, weights, tmp_path, monkeypatch):
    transfer, tensors, sent = transfer_over("directory", evolve(TWO_RANKS, refit_directory=str(tmp_path))), weights(5), []
    for version in range(5, 8):
        with_special_values(tensors, 0x7FC00000 + version)
        replica.begin_update().result()
        transfer.send(export_of(tensors, version), "host")
        replica.end_update({0: version}).result()
        sent.append(transfer.sent_bytes)
        for tensor in tensors.values():
            tensor.view(-1)[:: 50 + version] *= 1.5
    held = parameter_digests(replica)
    assert max(sent[1:]) < 0.1 * sent[0]
    with monkeypatch.context() as patched:
        patched.setattr(directory, "encode", lambda new, old: encode(old, old))  # every change is lost
        with pytest.raises(RefitError, match="changed on the way"):
            transfer.send(export_of(tensors, 8), "host")
    transfer.send(export_of(tensors, 8), "host")
    assert transfer.sent_bytes == sent[0]
    assert parameter_digests(replica) != held
    held = parameter_digests(replica)
    refit([replica], transfer_over("shared_memory"), export_of(tensors, 9))
    assert parameter_digests(replica) == held


def test_ranks_import_nothing_that_no_option_asked_for(replica, torchao_imported):
    assert not torchao_imported.exists()


def test_each_rank_keeps_to_its_own_cores(replica):
    ranks = psutil.Process(replica._child.process.pid).children()
    found = [rank.cpu_affinity() for rank in sorted(ranks, key=lambda rank: rank.name()) if "TP" in rank.name()]
    assert found == [[int(core) for core in cores.split(",")] for cores in omp_threads_bind(2).split("|")]


def test_what_tokens_are_sampled_among_comes_from_the_rank_that_samples(replica, transfer_over, weights):
    refit([replica], transfer_over("shared_memory"), export_of(weights(9), 9))
    finished = finished_samples(
        replica, 9, num_samples=4, max_tokens=[1, 5, 12] * 4, sampling=SamplingParams(top_k=3), masked=True
    )
    assert sorted(len(each.tokens) for each in finished) == sorted([1, 5, 12] * 4)
    for each in finished:
        each.sampling_mask.check(each.tokens)
        assert set(each.sampling_mask.lengths.tolist()) == {3}


def test_what_ranks_answer_is_copied_out_of_vllms_queue(replica):
    """The process that reads the answers does so, of which the ranks are forks."""
    assert replica.call_workers("refit_test_copies_messages", {}).result() == [True, True]


def test_larger_buckets_than_before(replica, transfer_over, weights, assert_holds):
    transfer = transfer_over("shared_memory")
    for version, bucket_bytes in enumerate((5_000, 200_000, 2**20), 10):
        refit([replica], transfer, export_of(weights(version), version, bucket_bytes=bucket_bytes))
    assert_holds(12, 10, 11)


def test_weights_of_nan_leave_nothing_behind(replica, transfer_over, weights, assert_holds):
    transfer = transfer_over("shared_memory")
    refit([replica], transfer, export_of(not_finite(weights(13)), 13))
    sample(replica, 13, num_samples=4)
    refit([replica], transfer, export_of(weights(14), 14))
    assert_holds(14)


@pytest.mark.wide  # test_transfer.py has output layers of their own, on one rank
def test_an_output_layer_of_its_own_of_which_the_second_rank_holds_nothing(tmp_path):
    """Beside an embedding of which it holds nothing either; the other tests' model has the two in one."""
    folder = make_model(tmp_path / "model", "qwen3", tied=False, alphabet=string.ascii_lowercase, **MODEL)
    config = evolve(CONFIG, tensor_parallel=2)
    context = context_of(folder, "shared_memory")
    with contextlib.ExitStack() as stack:
        replica = ProcessReplica("vllm-0", engine_settings(context, config), (), config, tmp_path)
        stack.callback(replica.close)
        replica.start()
        transfer = Transfer(channel="shared_memory", replicas=[replica], context=context, config=config)
        stack.callback(transfer.close)
        for version in range(2):
            refit([replica], transfer, export_of(checkpoint(policy(folder, version)), version))
            assert greatest_error(policy(folder, version), sample(replica, version)) < TOLERANCE
        without = {name: tensor for name, tensor in checkpoint(policy(folder, 2)).items() if "embed_tokens" not in name}
        with pytest.raises(RefitError, match=r"embed_tokens"):
            refit([replica], transfer, export_of(without, 2))


def flip_a_bit_of_shared_memory(patch, number):
    put = shared_memory.Sender.put

    def spoil(sender, index, tensors):
        where = put(sender, index, tensors)
        if index == number:
            sender.segments[index % 2].buffer[0] ^= 1
        return where

    patch.setattr(shared_memory.Sender, "put", spoil)


def flip_a_bit_of_a_file(patch, number):
    put = directory.Sender.put

    def spoil(sender, index, tensors):
        where = put(sender, index, tensors)
        if index == number:
            file = Path(where["file"])
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        return where

    patch.setattr(directory.Sender, "put", spoil)


@pytest.mark.parametrize(
    ("channel", "flip", "place"),
    [("shared_memory", flip_a_bit_of_shared_memory, 0), ("directory", flip_a_bit_of_a_file, -1)],
)
def test_what_changes_on_the_way_is_caught_by_both_ranks(
    channel, flip, place, replica, transfer_over, weights, assert_holds, monkeypatch
):
    transfer, export = transfer_over(channel), export_of(weights(20), 20)
    buckets = list(export.buckets)
    name = buckets[2].tensors[place].name
    with monkeypatch.context() as patch:
        flip(patch, 2)
        with pytest.raises(RefitError, match=f"digests: {name} .replica vllm-0, rank 0"):
            refit([replica], transfer, with_buckets(export, buckets))
    refit([replica], transfer, export_of(weights(21), 21))
    assert_holds(21, 20)


def test_an_embedding_that_is_not_sent_is_missed_by_both_ranks(replica, transfer_over, weights):
    without = {name: tensor for name, tensor in weights(25).items() if "embed_tokens" not in name}
    with pytest.raises(RefitError, match=r"embed_tokens"):
        refit([replica], transfer_over("shared_memory"), export_of(without, 25))


def test_a_dropped_tensor_is_named(replica, transfer_over, weights):
    export = export_of(weights(22), 22)
    first, *rest = export.buckets
    with pytest.raises(RefitError, match="missing from the buckets: .*" + first.tensors[0].name):
        refit([replica], transfer_over("shared_memory"), with_buckets(export, rest))


def test_a_folder_that_is_not_there(replica, transfer_over, weights, tmp_path):
    transfer = transfer_over("directory", evolve(TWO_RANKS, refit_directory=str(tmp_path / "none")))
    with pytest.raises(RefitError, match=r"none failed: .*No such file.*refit_directory"):
        refit([replica], transfer, export_of(weights(23), 23))


def test_in_process_reaches_no_other_process(replica, transfer_over, weights):
    with pytest.raises(RefitError, match="channel in_process"):
        refit([replica], transfer_over("in_process"), export_of(weights(24), 24))


def test_a_rank_that_hangs(replica, transfer_over, weights, fault_file, assert_holds):
    """Here it comes to itself again, and takes the next refit, though it was never told that this one ended."""
    go_on = fault_file.with_name("go-on")
    fault_file.write_text(json.dumps({"rank": 1, "wait_for": str(go_on)}))
    replica.begin_update().result()
    with pytest.raises(WorkerError, match=r"replica vllm-0 .* \(bucket\) within 4 s"):
        transfer_over("shared_memory", evolve(TWO_RANKS, refit_timeout_s=4.0)).send(export_of(weights(30), 30))
    go_on.touch()
    replica.end_update({0: 30}).result()
    refit([replica], transfer_over("shared_memory"), export_of(weights(31), 31))
    assert_holds(31, 30)


def test_a_rank_that_dies(replica, transfer_over, weights, fault_file, lost):
    lost.append("rank 1")
    fault_file.write_text(json.dumps({"rank": 1, "die": True}))
    replica.begin_update().result()
    with pytest.raises(WorkerError, match=r"replica vllm-0 failed .* \(bucket\)"):
        transfer_over("shared_memory").send(export_of(weights(32), 32))
