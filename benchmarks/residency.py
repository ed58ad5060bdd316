"""Seconds until a generator has left the device and is back, and what it leaves there, against plain vLLM in the same run.

    python benchmarks/residency.py
    python benchmarks/residency.py --quick --device cpu     # a tiny shape; a CPU has no device memory: a dash

A 1.5B Qwen2 shape in bfloat16, on half of the device's memory. `discard`: weights are dropped and come back by a refit, as in a
run; `host`: a copy of them waits in the host's memory. The wake is in two stages, weights before the KV cache; a refit between
them is in a column of its own. `plain level N` is vLLM's LLM.sleep and wake_up with the same arguments; level 2 drops the
weights and is not refitted. What is left is what this machine's device has in use above what it had before the engine began,
less the benchmark's own weights.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from generator_setup import (
    GIB,
    export_of,
    finish,
    first_and_median,
    make_generator,
    plain_arguments,
    refit,
    row_parser,
    run_row,
    synchronize,
    used_bytes,
    versions,
)
from model_shapes import make_model, require_device, write_config

from rlcore.spi import CloseRequest, SetResidencyRequest

ROWS = ("discard", "host", "plain level 1", "plain level 2")
PARTS = ("sleep", "wake", "sleep + wake", "refit")
MAX_LENGTH = 640


def measure_generator(row: str, shape: str, device: str, directory: Path, channel: str, repeats: int) -> dict[str, Any]:
    """Each cycle's seconds and what was left."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    model = make_model(shape, device, dtype)
    before = used_bytes()
    generator = make_generator("vllm", write_config(directory, shape, dtype), device, dtype, channel, MAX_LENGTH, {})
    refit(generator, export_of(model, 0), channel)
    awake = used_bytes() - before
    discard = row == "discard"
    cycles, left, reported = [], [], []
    for weight_version in range(1, repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        asleep = SetResidencyRequest(weights="host", state="host", discard_weights=discard)
        reported.append(generator.set_residency(asleep).device_bytes)
        slept = time.perf_counter()
        left.append(used_bytes() - before)
        woke = time.perf_counter()
        generator.set_residency(SetResidencyRequest(weights="device", state="host"))
        first_stage = time.perf_counter()
        if discard:
            refit(generator, export_of(model, weight_version), channel)
        refitted = time.perf_counter()
        generator.set_residency(SetResidencyRequest(weights="device", state="device"))
        wake = time.perf_counter() - refitted + first_stage - woke
        sleep = slept - start
        cycles.append({"sleep": sleep, "wake": wake, "sleep + wake": sleep + wake, "refit": refitted - first_stage})
    generator.close(CloseRequest())
    return {"cycles": cycles, "left": left, "reported": max(reported), "awake": awake}


def measure_plain(row: str, shape: str, directory: Path, repeats: int) -> dict[str, Any]:
    """vLLM's own."""
    from vllm import LLM

    write_config(directory, shape, "bfloat16")
    before = used_bytes()
    engine = LLM(**plain_arguments(directory, "cuda", "bfloat16", MAX_LENGTH, {}))
    awake = used_bytes() - before
    cycles, left = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.sleep(level=int(row[-1]))
        sleep = time.perf_counter() - start
        left.append(used_bytes() - before)
        start = time.perf_counter()
        engine.wake_up(tags=["weights"])
        engine.wake_up(tags=["kv_cache"])
        wake = time.perf_counter() - start
        cycles.append({"sleep": sleep, "wake": wake, "sleep + wake": sleep + wake, "refit": 0.0})
    return {"cycles": cycles, "left": left, "reported": None, "awake": awake}


def print_row(row: str, found: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"{row:16}{found['failed']}")
        return
    columns = ""
    for part in PARTS:
        first, median = first_and_median([cycle[part] for cycle in found["cycles"]])
        columns += f"{f'{first:.2f} / {median:.2f}':>16}"
    sizes = (found["awake"], max(found["left"]), found["reported"])
    awake, left, reported = ("-" if not size else f"{size / GIB:.2f}" for size in sizes)
    print(f"{row:16}{columns}{awake:>12}{left:>10}{reported:>14}", flush=True)


def main() -> None:
    parser = row_parser(__doc__, 250.0)
    parser.add_argument("--rows", nargs="+", choices=ROWS)
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--repeats", type=int, default=6, help="the first, and those that the median is of")
    parser.add_argument("--channel", help="how the weights come; cuda_ipc on a GPU, in_process on a CPU")
    arguments = parser.parse_args()
    shape, device = "tiny" if arguments.quick else arguments.shape, arguments.device
    channel = arguments.channel or ("cuda_ipc" if device == "cuda" else "in_process")
    require_device(arguments.device)
    if arguments.row:
        with tempfile.TemporaryDirectory() as scratch:
            if arguments.row.startswith("plain"):
                result = measure_plain(arguments.row, shape, Path(scratch), arguments.repeats)
            else:
                result = measure_generator(arguments.row, shape, device, Path(scratch), channel, arguments.repeats)
        finish(result)
    print(f"{versions(device)}; {shape}, {arguments.repeats} times, weights by {channel}; {os.cpu_count()} cores")
    heads = "".join(f"{f'{part} s':>16}" for part in PARTS)
    print(f"{'first / median':16}{heads}{'awake GiB':>12}{'left GiB':>10}{'it says GiB':>14}")
    for row in arguments.rows or [row for row in ROWS if device == "cuda" or not row.startswith("plain")]:
        print_row(row, run_row(__file__, row, arguments.limit))


if __name__ == "__main__":
    main()
