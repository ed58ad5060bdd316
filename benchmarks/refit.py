"""Seconds until a generator holds new weights, digests and cache reset included, against TRL's colocated vLLM in the same run.

    python benchmarks/refit.py                                  # needs TRL beside vLLM; two GPUs add nccl and shards
    python benchmarks/refit.py --shapes 1.5b --rows cuda_ipc
    python benchmarks/refit.py --quick --device cpu             # a tiny shape: shared memory and in process

A process holds the weights in bfloat16 on the device, as a trainer does, exports them in buckets with a digest for each tensor,
and the engine acknowledges what it received. `CHANNEL` takes the tensors of a transformers model; `CHANNEL-fsdp2` those of
the trainer `fsdp2`, whose master weights are float32. With `nccl` and `shards` the engine is on the second GPU. `trl` is TRL's
own loop, a `load_weights` for each parameter, without any check of what arrived. Engines start without compiled graphs, which
changes no refit. The weights are scaled anew before each, so that none is the same twice.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve
from generator_setup import (
    BUCKET_BYTES,
    Stopwatch,
    copy_bandwidth,
    export_of,
    finish,
    first_and_median,
    make_generator,
    refit,
    row_parser,
    run_row,
    specs_of,
    synchronize,
    versions,
)
from model_shapes import make_model, num_parameters, require_device, write_config, write_model

from rlcore.spi import CloseRequest, ExportWeightsRequest, ModelSpec, RankInfo, TrainerContext, WeightExport

PARTS = ("total", "export", "transfer", "finish")
MAX_LENGTH = 640


def measure_rlcore(
    row: str, shape: str, device: str, directory: Path, repeats: int, bucket_bytes: int
) -> list[dict[str, float]]:
    """Each refit's seconds."""
    channel, _, source = row.partition("-")
    dtype = "bfloat16" if device == "cuda" else "float32"
    fsdp2 = source == "fsdp2"
    (write_model(directory, shape, device, dtype) if fsdp2 else write_config(directory, shape, dtype))
    options: dict[str, Any] = {"enforce_eager": True}
    if channel in ("nccl", "shards") and device == "cuda":
        options["devices"] = [1]
    generator = make_generator("vllm", directory, device, dtype, channel, MAX_LENGTH, options)
    if fsdp2:
        export = _trainer_export(directory, device, dtype, bucket_bytes, sharded=channel == "shards")
    else:
        export = _model_export(shape, device, dtype, bucket_bytes)
    found = []
    for weight_version in range(repeats):
        made = export(weight_version)
        synchronize(device)
        watch = Stopwatch()
        weights = made()
        refit(generator, evolve(weights, buckets=watch.buckets(weights.buckets)), channel)
        found.append(watch.end())
    generator.close(CloseRequest())
    return found


def _model_export(shape: str, device: str, dtype: str, bucket_bytes: int) -> Callable[[int], Callable[[], WeightExport]]:
    """Scales the weights; what it returns is to be measured."""
    import torch

    model = make_model(shape, device, dtype)
    specs = specs_of(model)

    def export(weight_version: int) -> Callable[[], WeightExport]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        return partial(export_of, model, weight_version, specs, bucket_bytes)

    return export


def _trainer_export(
    directory: Path, device: str, dtype: str, bucket_bytes: int, *, sharded: bool
) -> Callable[[int], Callable[[], WeightExport]]:
    """Return a function that is to be measured."""
    from rlcore.registry.binding import build_trainer
    from rlcore.registry.discovery import discover
    from rlcore.schema.structure import structure

    entry = next(entry for entry in discover().of("trainer") if entry.name == "fsdp2")
    config, _ = structure({}, entry.provider.config, "trainer.fsdp2")
    context = TrainerContext(
        model=ModelSpec(path=str(directory), dtype=dtype),
        rank_info=RankInfo(device=device),
        seed=0,
        num_train_steps=1,
        needs_reference=False,
        max_sequence_length=MAX_LENGTH,
    )
    trainer = build_trainer(entry, context, config)

    def export(weight_version: int) -> WeightExport:
        request = ExportWeightsRequest(weight_version=0, dtype=dtype, max_bucket_bytes=bucket_bytes, sharded=sharded)
        return evolve(trainer.export_weights(request), weight_version=weight_version)

    return lambda weight_version: partial(export, weight_version)


def measure_trl(row: str, shape: str, device: str, directory: Path, repeats: int) -> list[dict[str, float]]:
    """TRL's VLLMGeneration.sync_weights, as its trainers call it before they generate."""
    import torch
    import trl.generation.vllm_generation as trl_vllm
    from accelerate import Accelerator
    from transformers import AutoTokenizer

    write_config(directory, shape, "bfloat16")
    # The weights come by sync_weights, so none need be on disk.
    trl_vllm.LLM = partial(trl_vllm.LLM, load_format="dummy", enforce_eager=True)
    model = make_model(shape, device, "float32" if row == "trl-float32" else "bfloat16")
    model.name_or_path = model.config._name_or_path = str(directory)
    generation = trl_vllm.VLLMGeneration(
        model,
        Accelerator(),
        AutoTokenizer.from_pretrained(directory),
        mode="colocate",
        gpu_memory_utilization=0.4,
        max_model_length=MAX_LENGTH,
        max_num_seqs=512,
    )
    found = []
    for _ in range(repeats):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        synchronize(device)
        start = time.perf_counter()
        generation.sync_weights()
        synchronize(device)
        found.append({"total": time.perf_counter() - start})
    return found


def measure_floor(shape: str, device: str) -> list[dict[str, float]]:
    """One copy of the weights at the rate that a copy on this device has."""
    num_bytes = num_parameters(shape) * (2 if device == "cuda" else 4)
    return [{"total": 2 * num_bytes / copy_bandwidth(device)}]


def print_row(shape: str, row: str, found: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"{shape:6}{row:22}{found['failed']}")
        return
    times = found["times"]
    first, median = first_and_median([each["total"] for each in times])
    rest = [first_and_median([each[part] for each in times])[1] if part in times[0] else None for part in PARTS[1:]]
    columns = "".join(f"{'' if seconds is None else f'{seconds:.3f}':>10}" for seconds in rest)
    second = f"{times[1]['total']:.3f}" if times[1:] else ""
    print(f"{shape:6}{row:22}{first:10.3f}{second:>10}{median:10.3f}{columns}{found['process_s']:12.0f}", flush=True)


def default_rows(shape: str, device: str) -> list[str]:
    if device == "cpu":
        return ["floor", "in_process", "shared_memory", "in_process-fsdp2"]
    num_devices = len(subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines())
    rows = ["floor", "cuda_ipc", "trl"]
    rows += ["cuda_ipc-fsdp2", "trl-float32"] if shape == "1.5b" else []
    return rows + (["nccl", "shards-fsdp2"] if num_devices > 1 else [])


def main() -> None:
    parser = row_parser(__doc__, 300.0)
    parser.add_argument("--shapes", nargs="+", default=["1.5b", "8b"])
    parser.add_argument("--rows", nargs="+", help="CHANNEL, CHANNEL-fsdp2, trl, trl-float32, floor")
    parser.add_argument("--repeats", type=int, default=6, help="the first, and those that the median is of")
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_BYTES // 2**20, help="most that travels at once")
    arguments = parser.parse_args()
    shapes = ["tiny"] if arguments.quick else arguments.shapes
    require_device(arguments.device)
    if arguments.row:
        if arguments.row == "floor":
            finish({"times": measure_floor(shapes[0], arguments.device)})
        with tempfile.TemporaryDirectory() as scratch:
            work = arguments.row, shapes[0], arguments.device, Path(scratch), arguments.repeats
            is_trl = arguments.row.startswith("trl")
            times = measure_trl(*work) if is_trl else measure_rlcore(*work, arguments.bucket_mib * 2**20)
        finish({"times": times})
    print(f"{versions(arguments.device)}; {arguments.repeats} refits; {os.cpu_count()} cores")
    heads = "".join(f"{head:>10}" for head in ("first s", "second s", "median s", *PARTS[1:]))
    print(f"{'shape':6}{'':22}{heads}{'process s':>12}")
    for shape in shapes:
        for row in arguments.rows or default_rows(shape, arguments.device):
            print_row(shape, row, run_row(__file__, row, arguments.limit, "--shapes", shape))


if __name__ == "__main__":
    main()
