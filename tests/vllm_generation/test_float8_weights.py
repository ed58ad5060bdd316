"""What a real engine on CPU makes of a refit's weights in 8 bits. It computes nothing with them: their products need AMX, which
many machines lack, so that they are compared one by one."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))

from vllm_float8 import assert_holds, held_weights
from vllm_refit_support import BUCKET_BYTES, CONFIG, checkpoint, context_of, export_of, policy, refit, reusing, with_buckets

from rlcore.spi import RefitError
from rlcore_torchkit.testing.models import make_model

pytest.importorskip("vllm")

from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from rlcore_vllm.ranks.loading import Loader
from rlcore_vllm.refit.transfer import Transfer
from rlcore_vllm.replicas.replica import LocalReplica
from rlcore_vllm.setup.settings import engine_settings

CONFIG = evolve(CONFIG, quantization="fp8_per_block")
FAMILIES = {"dense": ("qwen3", True, 192, (8, 11)), "experts": ("qwen3_moe", False, 256, (8, 13))}
"""Family, whether the head is tied, width, and how many layers are in 8 bits and not, in two decoder layers. A width of blocks
that are not whole, which vLLM fills up where there are experts."""


class Engine:
    def __init__(self, directory):
        self.directory = directory
        context = context_of(directory, "in_process", dtype="bfloat16")
        self.replica = LocalReplica("vllm-0", engine_settings(context, CONFIG), ())
        self.replica.start()
        self.transfer = Transfer(channel="in_process", replicas=[self.replica], context=context, config=CONFIG)

    def weights(self, version):
        return checkpoint(policy(self.directory, version), dtype=torch.bfloat16)

    def refit(self, export):
        refit([self.replica], self.transfer, export)

    def held(self):
        (held,) = self.replica.call_workers(held_weights, {}).result()
        return held

    def close(self):
        self.transfer.close()
        self.replica.close()


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request, tmp_path_factory):
    architecture, tied, width, counts = FAMILIES[request.param]
    size = {"hidden_size": width, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "initializer_range": 0.05}
    directory = make_model(tmp_path_factory.mktemp("float8") / "model", architecture, tied=tied, dtype="bfloat16", **size)
    # What quantises blocks would be compiled.
    with torch._dynamo.config.patch(disable=True), pytest.MonkeyPatch.context() as patch:
        # The kernels for CPUs lay weights out for AMX.
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        patch.setattr(CPUFp8BlockScaledMMKernel, "process_weights_after_loading", lambda kernel, layer: None)
        patch.setattr(cpu_moe, "prepare_fp8_moe_layer_for_cpu", lambda *weights: weights)
        with contextlib.closing(Engine(directory)) as made:
            made.counts = counts
            yield made


@pytest.mark.parametrize("is_reused", [False, True])
def test_each_refit_is_quantised_anew(is_reused, engine):
    for version in range(2):
        tensors = engine.weights(version)
        export = export_of(tensors, version, persistent=not is_reused, bucket_bytes=BUCKET_BYTES)
        engine.refit(with_buckets(export, reusing(export.buckets)) if is_reused else export)
        held = engine.held()
        assert assert_holds(tensors, held, per_block=True) == engine.counts
        with pytest.raises(AssertionError):
            assert_holds(engine.weights(version + 1), held, per_block=True)


@pytest.mark.parametrize("part", [0, 1])
def test_one_wrong_code_or_scale_shows(part, engine):
    tensors = engine.weights(5)
    engine.refit(export_of(tensors, 5))
    held = engine.held()
    first = next(found for found in held.values() if isinstance(found, list))
    first[part].flat[0] = first[part].flat[0] ^ 2 if part == 0 else first[part].flat[0] * 1.001
    with pytest.raises(AssertionError):
        assert_holds(tensors, held, per_block=True)


def test_a_layer_that_got_nothing_is_named(engine, monkeypatch):
    load, lost = Loader.load, "model.layers.1.self_attn.o_proj.weight"

    def load_others(loader, tensors, stable, partial):
        load(loader, [each for each in tensors if each[0] != lost], stable, partial)

    monkeypatch.setattr(Loader, "load", load_others)
    with pytest.raises(RefitError, match="o_proj"):
        engine.refit(export_of(engine.weights(6), 6))
    monkeypatch.undo()
    tensors = engine.weights(7)
    engine.refit(export_of(tensors, 7))
    assert assert_holds(tensors, engine.held(), per_block=True) == engine.counts
