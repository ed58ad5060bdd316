"""What each rank does to train, to refit vLLM's engines from all ranks, and to compare both sides' log-probabilities."""

import faulthandler
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from rank_launch import run_rows

sys.path.insert(0, str(Path(__file__).parent.parent / "vllm_generation"))

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from megatron_support import OPTIMIZER, make_backend, make_batch, split, step_request
from vllm_refit_support import BUCKET_BYTES, CONFIG, MODEL, TOLERANCE, context_of, refit, sample

from rlcore.spi import CloseRequest, ExportWeightsRequest, LogprobsRequest, RaggedTokens, TokenBatch, WeightExport
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.testing.models import make_model
from rlcore_vllm.refit.transfer import Transfer
from rlcore_vllm.replicas.process import ProcessReplica
from rlcore_vllm.replicas.replica import LocalReplica
from rlcore_vllm.setup.settings import engine_settings

NUM_RANKS = 4
LIMIT_S = 500
"""After which a rank that hangs says where, and ends."""
SPEC = evolve(OPTIMIZER, learning_rate=1e-2)

Samples = list[tuple[list[int], list[int], np.ndarray]]
"""Prompt, response and its log-probabilities."""


@frozen(kw_only=True)
class Engine:
    """A generator, and the channels by which it gets the weights after each step in turn."""

    channels: tuple[str, str]
    tensor_parallel: int = 1


@frozen(kw_only=True)
class Case:
    """A trainer's layout, and the engines that it brings its weights to."""

    architecture: str
    sizes: Mapping[str, int]
    engines: tuple[Engine, ...]


HERE = Engine(channels=("in_process", "in_process"))
ELSEWHERE = Engine(channels=("shared_memory", "directory"), tensor_parallel=2)
CASES = {
    "tp2xpp2": Case(architecture="qwen3", sizes={"tensor_parallel": 2, "pipeline_parallel": 2}, engines=(HERE, ELSEWHERE)),
    "ep2xpp2": Case(architecture="qwen3_moe", sizes={"expert_parallel": 2, "pipeline_parallel": 2}, engines=(HERE,)),
}


def prepare(root: Path) -> None:
    """The models. The dense one has one key head, which tensor ranks of trainer and engine share."""
    for case in CASES.values():
        is_dense = case.architecture == "qwen3"
        key_heads = {"num_kv_heads": 1} if is_dense else {}
        make_model(root / case.architecture, case.architecture, tied=is_dense, **MODEL | key_heads)


class Refitted:
    """An engine, on the first rank."""

    def __init__(self, engine: Engine, model: Path, logs: Path) -> None:
        self.config = evolve(CONFIG, tensor_parallel=engine.tensor_parallel)
        self.contexts = [context_of(model, channel) for channel in engine.channels]
        settings = engine_settings(self.contexts[0], self.config)
        if engine is HERE:
            self.replica = LocalReplica("vllm-0", settings, ())
        else:
            self.replica = ProcessReplica("vllm-0", settings, (), self.config, logs)
        self.replica.start()

    def refit(self, export: WeightExport) -> None:
        """Both sides compare digests."""
        context = self.contexts[export.weight_version - 1]
        options = {"channel": context.channel, "replicas": [self.replica], "context": context, "config": self.config}
        with closing(Transfer(**options)) as transfer:
            refit([self.replica], transfer, export)

    def close(self) -> None:
        self.replica.close()


def sync_weights(trainer: MegatronBackend, refitted: Refitted | None, version: int) -> Samples:
    """On every rank; what the engine then samples, on every rank too."""
    request = ExportWeightsRequest(weight_version=version, dtype="float32", max_bucket_bytes=BUCKET_BYTES)
    export = trainer.export_weights(request)
    if refitted is not None:
        refitted.refit(export)
    for _ in export.buckets:
        pass
    return from_first(None if refitted is None else sample(refitted.replica, version))


def from_first(value: Any) -> Any:
    """The first rank's, on every rank."""
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


def greatest_error(trainer: MegatronBackend, samples: Samples, version: int) -> float:
    """Of the engine's log-probabilities against the trainer's; every rank takes part."""
    whole = RaggedTokens.from_lists([[*prompt, *response] for prompt, response, _ in samples])
    mask = np.concatenate([np.arange(len(prompt) + len(response)) >= len(prompt) for prompt, response, _ in samples])
    batch = TokenBatch(tokens=whole.tokens, offsets=whole.offsets, loss_mask=mask)
    request = LogprobsRequest(microbatches=(batch,), model="policy", temperature=1.0, entropy=False, weight_version=version)
    (found,) = trainer.get_logprobs(request).logprobs
    return float(np.abs(found[mask] - np.concatenate([logprobs for _, _, logprobs in samples])).max())


def train(trainer: MegatronBackend, version: int) -> None:
    batch, layout = make_batch(seed=version, num_sequences=8), trainer.layout
    mine = range(layout.data_parallel_rank, batch.num_sequences, layout.data_parallel_size)
    trainer.train_step(step_request(split(batch, [mine]), batch.counts(), version))


def check_refits(case: Case, rank: int, root: Path) -> None:
    """After each of two steps both sides agree on what the engines sample, which they would not with the weights before."""
    model = root / case.architecture
    with ExitStack() as stack:
        engines: list[Refitted | None] = [None] * len(case.engines)
        if rank == 0:
            engines = [stack.enter_context(closing(Refitted(engine, model, root))) for engine in case.engines]
        from_first(None)  # engines start for longer than a collective of the trainer may take
        place = {"rank": rank, "world_size": NUM_RANKS, "local_rank": rank}
        trainer = make_backend(model, config=MegatronConfig(collective_timeout_s=600.0, **case.sizes), optimizer=SPEC, **place)
        train(trainer, 0)
        samples = [sync_weights(trainer, engine, 1) for engine in engines]
        assert all(greatest_error(trainer, each, 1) < TOLERANCE for each in samples)
        train(trainer, 1)
        assert all(greatest_error(trainer, each, 2) > 100 * TOLERANCE for each in samples)
        samples = [sync_weights(trainer, engine, 2) for engine in engines]
        assert all(greatest_error(trainer, each, 2) < TOLERANCE for each in samples)
        trainer.close(CloseRequest())


def run_all(rank: int, root: Path, names: Collection[str]) -> None:
    """Run the cases of these names."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=NUM_RANKS)
    rows = {name: partial(check_refits, case, rank, root) for name, case in CASES.items() if name in names}
    run_rows(rows, root / f"results-{rank}.json")
    dist.destroy_process_group()
