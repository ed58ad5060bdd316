"""Tokens per second and peak memory of training on long sequences, one rank per GPU, each layout in a launch of its own.

    python benchmarks/long_context.py --gpus 8 --lengths 16384 65536 --context 4 8
    python benchmarks/long_context.py --quick --gpus 2 --lengths 256 --context 1 2     # on a CPU, to try the script

One optimizer step takes one microbatch of one sequence for every data-parallel rank; median of three after one that warms up.
Model FLOPs as in train_step.py; peak memory is the largest of the ranks'.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import asdict, frozen
from model_shapes import SHAPES, active_weights, attention_flops, require_device, write_model

from rlcore.spi import CloseRequest, GlobalCounts, LossSpec, ModelSpec, RankInfo, TokenBatch, TrainerContext, TrainStepRequest
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig

PEAK_FLOPS = 989e12
NUM_STEPS = 3
LOSS = LossSpec(path="train_step:negative_loglikelihood", config=None)


@frozen(kw_only=True)
class Work:
    """Of one launch."""

    shape: str
    model: str
    device: str
    trainer: str
    num_ranks: int
    context: int
    tensor: int
    length: int
    recompute: bool


@frozen(kw_only=True)
class Result:
    """Of one launch."""

    seconds: float
    peak_bytes: int
    loss: float


def backend_of(work: Work, rank: int, rendezvous: str) -> Any:
    context = TrainerContext(
        model=ModelSpec(path=work.model, dtype="bfloat16" if work.device == "cuda" else "float32"),
        rank_info=RankInfo(
            rank=rank,
            world_size=work.num_ranks,
            local_rank=rank,
            device=work.device,
            rendezvous=rendezvous,  # type: ignore[arg-type]
        ),
        seed=0,
        num_train_steps=1,
        needs_reference=False,
        max_sequence_length=work.length,
        max_microbatch_tokens=work.length,
    )
    sizes = {"context_parallel": work.context, "tensor_parallel": work.tensor}
    if work.trainer == "fsdp2":
        return Fsdp2Backend(context, Fsdp2Config(activation_checkpointing=work.recompute, **sizes))
    sizes |= {"pipeline_parallel": 1, "expert_parallel": 1}
    return MegatronBackend(context, MegatronConfig(recompute="full" if work.recompute else "none", **sizes))


def run_rank(rank: int, work: Work, rendezvous: str, file: str) -> None:
    """All steps; rank 0 writes the result."""
    backend = backend_of(work, rank, rendezvous)
    layout = backend.layout
    tokens = np.random.default_rng(layout.data_parallel_rank).integers(0, SHAPES[work.shape]["vocab_size"], work.length)
    loss_mask = np.ones(work.length, np.bool_)
    loss_mask[0] = False
    batch = TokenBatch(tokens=tokens.astype(np.int32), offsets=np.array([0, work.length]), loss_mask=loss_mask)
    counts = GlobalCounts(
        num_loss_tokens=(work.length - 1) * layout.data_parallel_size, num_loss_sequences=layout.data_parallel_size
    )
    seconds, loss = [], 0.0
    for version in range(NUM_STEPS + 1):
        request = TrainStepRequest(microbatches=(batch,), counts=counts, loss=LOSS, temperature=1.0, weight_version=version)
        start = time.perf_counter()
        loss = backend.train_step(request).loss
        if work.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.tensor([torch.cuda.max_memory_allocated() if work.device == "cuda" else 0])
    if work.num_ranks > 1:
        torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        result = Result(seconds=statistics.median(seconds[1:]), peak_bytes=int(peak), loss=loss)
        Path(file).write_text(json.dumps(asdict(result)))
    backend.close(CloseRequest())


def measure(work: Work) -> Result | None:
    """None where a rank failed, for want of memory as a rule; its error is printed."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "result.json"
        try:
            torch.multiprocessing.spawn(run_rank, (work, f"file://{scratch}/rendezvous", str(file)), nprocs=work.num_ranks)
        except Exception as error:
            print(f"{work}: {str(error).strip().splitlines()[-1]}")
            return None
        return Result(**json.loads(file.read_text()))


def print_row(work: Work, result: Result | None) -> None:
    name = f"{work.trainer}, {work.length:,} tokens, CP{work.context}" + (f" TP{work.tensor}" if work.tensor > 1 else "")
    name += ", recompute" if work.recompute else ""
    if result is None:
        print(f"{name:44}{'failed':>9}", flush=True)
        return
    sequences = work.num_ranks // (work.context * work.tensor)
    rate = sequences * work.length / result.seconds / work.num_ranks
    flops = rate * (6 * active_weights(work.shape) + 3 * attention_flops(work.shape, work.length**2) / work.length)
    shown = f"{result.seconds:9.3f}{rate:11,.0f}{flops / PEAK_FLOPS:9.1%}{result.peak_bytes / 1e9:9.1f}{result.loss:9.3f}"
    print(f"{name:44}{shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--context", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--trainers", nargs="+", choices=("megatron", "fsdp2"), default=["megatron"])
    parser.add_argument("--recompute", action="store_true", help="keep only the inputs of layers")
    parser.add_argument("--model-directory", type=Path, help="where the model is made, or found")
    parser.add_argument("--quick", action="store_true", help="a tiny shape on a CPU")
    arguments = parser.parse_args()
    shape, device = ("tiny", "cpu") if arguments.quick else (arguments.shape, "cuda")
    require_device(device)
    model = arguments.model_directory or Path(tempfile.gettempdir()) / f"rlcore-long-context-{shape}"
    if not (model / "config.json").exists():
        write_model(model, shape, "cpu", "bfloat16")
    print(
        f"{arguments.gpus} x {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}, {shape}"
    )
    print(f"{'':44}{'step s':>9}{'tok/s/GPU':>11}{'of peak':>9}{'peak GB':>9}{'loss':>9}")
    for trainer in arguments.trainers:
        for length in arguments.lengths:
            for context in arguments.context:
                work = Work(
                    shape=shape,
                    model=str(model),
                    device=device,
                    trainer=trainer,
                    num_ranks=arguments.gpus,
                    context=context,
                    tensor=arguments.tensor,
                    length=length,
                    recompute=arguments.recompute,
                )
                print_row(work, measure(work))


if __name__ == "__main__":
    main()
