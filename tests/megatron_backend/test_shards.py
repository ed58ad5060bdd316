"""Parts that travel are the export's tensors; tests/system sends them from several ranks, test_export puts them together."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import torch
from attrs import evolve
from lora_support import BATCHES, SPEC, lora_context
from megatron_families import make_own
from megatron_lora_cases import make
from megatron_support import make_context, split, step_request

from rlcore.spi import CloseRequest, ExportWeightsRequest, ShardRoute
from rlcore_torchkit.distributed.process_group import listening_store
from rlcore_torchkit.refit.shard_group import ProcessShardGroup
from rlcore_torchkit.refit.shard_route import ShardEnd, whole_slice
from rlcore_torchkit.testing.models import make_model

CPU, MAX_BYTES = torch.device("cpu"), 2**13


def test_with_adapters_merged_in_apart_and_alone(tmp_path):
    make_model(tmp_path, "qwen3")
    trainer = make(lora_context(tmp_path, SPEC), {})
    trainer.train_step(step_request(split(BATCHES[0], [[0, 1, 2, 3]]), BATCHES[0].counts(), 0))
    for adapters in ("merged", "apart", "alone"):
        compare(trainer, ExportWeightsRequest(weight_version=1, dtype="float32", max_bucket_bytes=MAX_BYTES, adapters=adapters))
    trainer.close(CloseRequest())


def test_of_experts_in_one_tensor_each_sends_its_own(tmp_path):
    make_own(tmp_path, "gpt_oss", num_hidden_layers=1)
    trainer = make(make_context(tmp_path), {})
    compare(trainer, ExportWeightsRequest(weight_version=0, dtype="bfloat16", max_bucket_bytes=MAX_BYTES))
    trainer.close(CloseRequest())


def test_of_tensors_that_take_turns_in_rows_each_sends_its_own(tmp_path):
    make_own(tmp_path, "qwen3_5_text", num_hidden_layers=2)
    trainer = make(make_context(tmp_path), {})
    compare(trainer, ExportWeightsRequest(weight_version=0, dtype="bfloat16", max_bucket_bytes=MAX_BYTES))
    trainer.close(CloseRequest())


def compare(trainer, request):
    """Buckets of whole tensors, and what comes by a route."""
    buckets = trainer.export_weights(request).buckets
    whole = {named.name: named.tensor.clone() for bucket in buckets for named in bucket.tensors}
    export = trainer.export_weights(evolve(request, sharded=True))
    store = listening_store("127.0.0.1", 0, None, timedelta(seconds=300), wait_for_workers=False)
    wanted = tuple(map(whole_slice, export.specs))
    route = ShardRoute(address=f"127.0.0.1:{store.port}", name=request.adapters, wanted=(wanted,), timeout_s=60.0)
    export.shards.route, found = route, {}
    held = export.shards.held

    def take():
        with closing(ProcessShardGroup(route, 1, 2, CPU)) as group:
            end = ShardEnd(specs=export.specs, held=held, wanted=route.wanted, group=group, number=1, max_bytes=MAX_BYTES)
            return end.take(lambda parts: found.update({spec.name: tensor for spec, _, tensor in parts}))

    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take)
        assert list(export.buckets) == []
        assert taken.result() == export.shards.digest
    assert found.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(found[name], whole[name])] == []
