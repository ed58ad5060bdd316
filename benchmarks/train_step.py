"""Tokens per second, FLOPs utilisation and peak memory of a training step, against plain transformers in the same run.

    python benchmarks/train_step.py           # Qwen2 of 1.5B, bfloat16, one CUDA device
    python benchmarks/train_step.py --quick    # the same steps on a tiny shape, on whatever device there is
    python benchmarks/train_step.py --shape 8b --layers 6 --sides megatron "megatron, float8" "megatron, float8 blockwise"

Both sides take the same optimizer steps on the same sequences, all of one length: forward, backward, clipping to norm 1 and
AdamW on float32 master weights. The trainers get them packed, `megatron` with TransformerEngine where that is installed; plain
transformers gets a [sequences, length] batch with torch's scaled_dot_product_attention, bfloat16 by autocast, and logits of the
whole microbatch.

Model FLOPs of a token: 6 N + 12 L D S/2, with N the weights in matrix products (the head is one, the embedding is not), L
layers, D = heads x head dimension, and S/2 the mean number of tokens that a token of a sequence of S attends to. Recomputed
work does not count. Utilisation is of 989 TFLOP/s, the dense bfloat16 peak of one H100 SXM.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import frozen
from model_shapes import SHAPES, active_weights, attention_flops, require_device, write_model
from transformers import AutoModelForCausalLM

from rlcore.spi import (
    CloseRequest,
    LossInputs,
    LossOutput,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    RankInfo,
    TokenBatch,
    TrainerContext,
    TrainStepRequest,
)
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_megatron.backend import MegatronBackend
from rlcore_megatron.setup.config import MegatronConfig

PEAK_FLOPS = 989e12
LEARNING_RATE = 1e-6
PRECISION_AWARE = {"use_precision_aware_optimizer": True}
NARROW = PRECISION_AWARE | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
ON_HOST = PRECISION_AWARE | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


@frozen(kw_only=True)
class Workload:
    """The data that both sides train on."""

    model: Path
    device: torch.device
    dtype: str
    tokens: "np.ndarray[Any, np.dtype[np.int32]]"
    """int32 [microbatches, sequences, length]"""


@frozen(kw_only=True)
class Result:
    """Of one side."""

    name: str
    seconds: float
    """Median step."""
    peak_bytes: int
    first_loss: float


def negative_loglikelihood(inputs: LossInputs, _config: None) -> LossOutput:
    """Mean over all loss tokens."""
    return LossOutput(loss=-(inputs.logprobs * inputs.loss_mask).sum() / inputs.counts.num_loss_tokens)


Steps: TypeAlias = tuple[Callable[[], float], Callable[[], None]]
"""A step that returns its loss, and what frees everything."""

LOSS = LossSpec(path="train_step:negative_loglikelihood", config=None)


def trainer_steps(workload: Workload, backend: Any, config: object) -> Steps:
    """A trainer's."""
    _, num_sequences, length = workload.tokens.shape
    context = TrainerContext(
        model=ModelSpec(path=str(workload.model), dtype=workload.dtype),
        rank_info=RankInfo(device=workload.device.type),
        seed=0,
        num_train_steps=1,
        needs_reference=False,
        max_sequence_length=length,
        max_microbatch_tokens=num_sequences * length,
        optimizer=OptimizerSpec(learning_rate=LEARNING_RATE),
    )
    trainer = backend(context, config)
    loss_mask = np.ones((num_sequences, length), np.bool_)
    loss_mask[:, 0] = False
    offsets = np.arange(num_sequences + 1, dtype=np.int64) * length
    microbatches = tuple(
        TokenBatch(tokens=tokens.reshape(-1), offsets=offsets, loss_mask=loss_mask.reshape(-1)) for tokens in workload.tokens
    )
    counts = TokenBatch(
        tokens=workload.tokens.reshape(-1),
        offsets=np.arange(len(microbatches) * num_sequences + 1, dtype=np.int64) * length,
        loss_mask=np.tile(loss_mask.reshape(-1), len(microbatches)),
    ).counts()
    version = 0

    def step() -> float:
        nonlocal version
        request = TrainStepRequest(microbatches=microbatches, counts=counts, loss=LOSS, temperature=1.0, weight_version=version)
        version += 1
        return trainer.train_step(request).loss

    return step, lambda: trainer.close(CloseRequest()) and None


def transformers_steps(workload: Workload) -> Steps:
    """The same in plain transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(
        workload.model, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
    )
    model.to(workload.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    microbatches = [torch.from_numpy(tokens).long().to(workload.device) for tokens in workload.tokens]
    num_loss_tokens = sum(tokens[:, 1:].numel() for tokens in microbatches)
    autocast = torch.autocast(workload.device.type, torch.bfloat16, enabled=workload.dtype == "bfloat16")

    def step() -> float:
        total = torch.zeros((), device=workload.device)
        for tokens in microbatches:
            with autocast:
                logits = model(input_ids=tokens, use_cache=False).logits
            logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None])
            loss = -logprobs.sum() / num_loss_tokens
            loss.backward()
            total += loss.detach()
            del logits, logprobs, loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return step, lambda: None


def measure(
    name: str, make: Callable[[], tuple[Callable[[], float], Callable[[], None]]], workload: Workload, steps: int
) -> Result:
    """Median of `steps` steps after two that warm up."""
    on_cuda = workload.device.type == "cuda"
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step, close = make()
    first_loss = step()
    step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        if on_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    close()
    return Result(name=name, seconds=statistics.median(seconds), peak_bytes=peak, first_loss=first_loss)


def flops_per_token(shape: str, length: int) -> float:
    """As the module's docstring says."""
    return 6 * active_weights(shape) + 3 * attention_flops(shape, length**2) / length


def print_table(results: list[Result], workload: Workload, shape: str) -> None:
    num_tokens, length = workload.tokens.size, workload.tokens.shape[-1]
    device = torch.cuda.get_device_name() if workload.device.type == "cuda" else "CPU"
    layers = f"{shape}, {SHAPES[shape]['num_hidden_layers']} layers"
    print(f"\n{device}, {workload.dtype}, torch {torch.__version__}; {layers}; a step is {workload.tokens.shape} tokens")
    print(f"{'':32}{'step s':>9}{'tokens/s':>11}{'TFLOP/s':>9}{'of peak':>9}{'peak GB':>9}{'first loss':>12}")
    for result in results:
        rate = num_tokens / result.seconds
        flops = rate * flops_per_token(shape, length)
        print(
            f"{result.name:32}{result.seconds:9.3f}{rate:11,.0f}{flops / 1e12:9.1f}{flops / PEAK_FLOPS:9.1%}"
            f"{result.peak_bytes / 1e9:9.1f}{result.first_loss:12.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--microbatches", type=int, default=1, help="microbatches of 8 sequences in an optimizer step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--layers", type=int, help="so many of the shape's decoder layers, where all of them do not fit")
    parser.add_argument("--sides", nargs="*", metavar="NAME", help="only these, by the names in the table")
    arguments = parser.parse_args()
    if not arguments.quick:
        require_device("cuda")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    shape, length = ("tiny", min(arguments.length, 64)) if arguments.quick else (arguments.shape, arguments.length)
    if arguments.layers:
        SHAPES[shape] |= {"num_hidden_layers": arguments.layers}
    tokens = (
        np.random.default_rng(0).integers(0, SHAPES[shape]["vocab_size"], (arguments.microbatches, 8, length)).astype(np.int32)
    )
    sides: dict[str, Any] = {
        "megatron": (MegatronBackend, MegatronConfig()),
        "megatron, full recompute": (MegatronBackend, MegatronConfig(recompute="full")),
        "fsdp2": (Fsdp2Backend, Fsdp2Config()),
        "fsdp2, compiled layers": (Fsdp2Backend, Fsdp2Config(compile_layers=True)),
        "fsdp2, activation checkpointing": (Fsdp2Backend, Fsdp2Config(activation_checkpointing=True)),
        "plain transformers": None,
    }
    if find_spec("transformer_engine"):
        sides |= {
            "megatron, float8": (MegatronBackend, MegatronConfig(fp8=True)),
            "megatron, float8 tensorwise": (
                MegatronBackend,
                MegatronConfig(fp8=True, transformer={"fp8_recipe": "tensorwise"}),
            ),
            "megatron, float8 blockwise": (MegatronBackend, MegatronConfig(fp8=True, transformer={"fp8_recipe": "blockwise"})),
            "megatron, no TransformerEngine": (MegatronBackend, MegatronConfig(transformer_engine=False)),
            "megatron, bfloat16 moments": (MegatronBackend, MegatronConfig(optimizer=NARROW)),
            "megatron, optimizer on the host": (MegatronBackend, MegatronConfig(optimizer=ON_HOST)),
        }
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch), shape, device.type, "bfloat16")
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        workload = Workload(model=model, device=device, dtype=dtype, tokens=tokens)
        results = []
        for name in arguments.sides or sides:
            side = sides[name]
            make = partial(transformers_steps, workload) if side is None else partial(trainer_steps, workload, *side)
            results.append(measure(name, make, workload, arguments.steps))
            print_table(results[-1:], workload, shape)  # a run that is cut off keeps what it has measured
    print_table(results, workload, shape)


if __name__ == "__main__":
    main()
