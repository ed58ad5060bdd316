"""Gradients of several adapters' small batches: in shared passes, by turns, and of one adapter with all tokens.

    python benchmarks/adapters_together.py                           # a Qwen3 shape of 3m, or 1.5b on a CUDA device
    python benchmarks/adapters_together.py --model MODEL_DIRECTORY
    python benchmarks/adapters_together.py --quick                   # a tiny shape and few rounds, to try the script

Each adapter has `--sequences` sequences of `--length` tokens. The three sides take turns, round by round; medians. One adapter
with all tokens is the floor: one forward and backward pass, one product of A and B a layer. The memory of a further adapter
stands beside its floor: weights, gradients and two moments in float32, 16 bytes for each element of A and B.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from model_shapes import SHAPES, write_model

from rlcore.spi import (
    CloseRequest,
    ForwardBackwardRequest,
    ForwardBackwardTogetherRequest,
    LoraSpec,
    LossInputs,
    LossOutput,
    LossSpec,
    ModelSpec,
    OptimStepRequest,
    RankInfo,
    TokenBatch,
    TrainerContext,
    UseAdapterRequest,
)
from rlcore.spi.arrays import offsets_of
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.config import Fsdp2Config

FLOOR_BYTES = 16
"""Bytes of each element of an adapter: weight, gradient and two moments in float32."""


def negative_loglikelihood(inputs: LossInputs, _config: None) -> LossOutput:
    """Mean over all loss tokens."""
    return LossOutput(loss=-(inputs.logprobs * inputs.loss_mask).sum() / inputs.counts.num_loss_tokens)


LOSS = LossSpec(path="adapters_together:negative_loglikelihood", config=None)


def batch_of(seed: int, vocab_size: int, num_sequences: int, length: int) -> TokenBatch:
    """Random tokens of sequences of one length."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (num_sequences, length)).astype(np.int32)
    loss_mask = np.ones(tokens.shape, np.bool_)
    loss_mask[:, 0] = False
    return TokenBatch(tokens=tokens.reshape(-1), offsets=offsets_of([length] * num_sequences), loss_mask=loss_mask.reshape(-1))


def piece_of(batch: TokenBatch, version: int = 0) -> ForwardBackwardRequest:
    """A step of one piece of one microbatch."""
    return ForwardBackwardRequest(
        microbatches=(batch,),
        counts=batch.counts(),
        loss=LOSS,
        temperature=1.0,
        weight_version=version,
        logprobs=False,
    )


def used_bytes(device: torch.device) -> int:
    """Bytes allocated on a CUDA device, or the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def begin_all(trainer: Fsdp2Backend, names: list[str], pieces: dict[str, ForwardBackwardRequest], device: torch.device) -> int:
    """Begin the adapters and make a step of each. Return the bytes that each beyond the second takes, the median."""
    held = []
    for seed, name in enumerate(names):
        trainer.use_adapter(UseAdapterRequest(name=name, seed=seed))
        trainer.forward_backward(pieces[name])
        trainer.optim_step(OptimStepRequest(pieces=1, weight_version=0))
        trainer.forward_backward(piece_of(pieces[name].microbatches[0], 1))
        held.append(used_bytes(device))
    return round(statistics.median(np.diff(held[1:]))) if len(held) > 2 else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape and few rounds, to try the script")
    parser.add_argument("--model", type=Path, help="a model directory, in place of a shape with random weights")
    parser.add_argument("--shape")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=2, help="sequences of each adapter")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    shape = "tiny" if arguments.quick else arguments.shape or ("1.5b" if device.type == "cuda" else "3m")
    rounds = 2 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as scratch:
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        model = arguments.model or write_model(Path(scratch), shape, device.type, dtype)
        vocab_size = 512 if arguments.model else SHAPES[shape]["vocab_size"]
        context = TrainerContext(
            model=ModelSpec(path=str(model), dtype=dtype),
            rank_info=RankInfo(device=device.type),
            seed=0,
            num_train_steps=1,
            needs_reference=False,
            max_sequence_length=arguments.length,
            max_microbatch_tokens=arguments.adapters * arguments.sequences * arguments.length,
            lora=LoraSpec(rank=arguments.rank),
        )
        trainer = Fsdp2Backend(context, Fsdp2Config())
        names = [f"client {number}" for number in range(arguments.adapters)]
        batches = [batch_of(seed, vocab_size, arguments.sequences, arguments.length) for seed in range(len(names))]
        first = dict(zip(names, map(piece_of, batches), strict=True))
        further = begin_all(trainer, names, first, device)
        elements = sum(p.numel() for p in trainer.policy.parameters() if p.requires_grad)
        pieces = {name: piece_of(batch, 1) for name, batch in zip(names, batches, strict=True)}
        whole = piece_of(batch_of(99, vocab_size, arguments.sequences * len(names), arguments.length), 1)

        def by_turns() -> None:
            for name, piece in pieces.items():
                trainer.use_adapter(UseAdapterRequest(name=name))
                trainer.forward_backward(piece)

        sides: dict[str, Callable[[], object]] = {
            "together": lambda: trainer.forward_backward_together(ForwardBackwardTogetherRequest(pieces=pieces)),
            "by turns": by_turns,
            "one adapter": lambda: trainer.forward_backward(whole),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds + 2):
            for side, call in sides.items():
                found = seconds_of(call, device)
                if number >= 2:
                    seconds[side].append(found)
        trainer.close(CloseRequest())
    num_tokens = arguments.adapters * arguments.sequences * arguments.length
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, {dtype}; {arguments.model or shape}")
    print(f"{arguments.adapters} adapters of rank {arguments.rank}, {num_tokens} tokens in all")
    floor = statistics.median(seconds["one adapter"])
    for side, found in seconds.items():
        middle = statistics.median(found)
        print(f"{side:14}{1000 * middle:10.1f} ms{num_tokens / middle:12,.0f} tokens/s{middle / floor:8.2f} x one adapter")
    floor_bytes = FLOOR_BYTES * elements
    print(f"further adapter {further / 1e6:9.2f} MB, floor {floor_bytes / 1e6:.2f} MB, {further / floor_bytes:.2f} x")


if __name__ == "__main__":
    main()
