"""Milliseconds of a decoding step of the generator `vllm`, by the number of sequences, against the memory that it reads.

    python benchmarks/decode_steps.py
    python benchmarks/decode_steps.py --rows default "full graphs" --set quantization=fp8 --set kv_cache_dtype=fp8
    python benchmarks/decode_steps.py --quick --device cpu       # a tiny shape, to try the script

The longest answer sets the number of steps of a generation, so its tail is steps with few sequences. One engine of the 8B
shape with random weights, in this process. A step's time is (long generation - short generation) / difference in tokens, which
cancels prompts. The floor of a step is its weights and the keys and values of all sequences, read once at the rate of a copy on
this device. With `--kernels N` the device's time of a step is divided among its N longest kernels, for 8 sequences.

Each row changes one option of the engine and has a process of its own.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from generator_setup import (
    copy_bandwidth,
    export_of,
    finish,
    make_generator,
    parse_options,
    refit,
    row_parser,
    run_row,
    versions,
)
from model_shapes import SHAPES, kv_bytes_per_token, make_model, num_parameters, prompts, require_device, write_config

from rlcore.spi import CloseRequest, GenerateRequest, RaggedTokens, SamplingParams

ROWS: dict[str, dict[str, Any]] = {
    "default": {},
    "full graphs": {"engine": {"compilation_config": {"cudagraph_mode": "FULL"}}},
    "FlashInfer": {"engine": {"attention_backend": "FLASHINFER"}},
    "head in bfloat16": {"engine": {"hf_overrides": {"head_dtype": "bfloat16"}}},
    "no asynchronous scheduling": {"engine": {"async_scheduling": False}},
}
SEQUENCES = {1: 2048, 4: 2048, 8: 2048, 16: 2048, 32: 1024, 64: 1024, 128: 512, 256: 512}
"""Tokens of the prompts, by the number of sequences."""
STEPS = (16, 144)
PROFILED = 8


def measure(row: str, shape: str, device: str, options: dict[str, Any], num_kernels: int) -> dict[str, Any]:
    """Milliseconds of a step by the number of sequences."""
    sequences, lengths = (SEQUENCES, STEPS) if shape != "tiny" else ({1: 8, 8: 8}, (2, 4))
    dtype = "bfloat16" if device == "cuda" else "float32"
    limit = max(sequences.values()) + lengths[1] + 1
    settings = {"max_num_seqs": max(sequences), **({"gpu_memory_utilization": 0.5} if device == "cuda" else {}), **options}
    settings |= {"engine": {**options.get("engine", {}), **ROWS[row].get("engine", {})}}
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), shape, dtype)
        generator = make_generator("vllm", Path(directory), device, dtype, "in_process", limit, settings)
        refit(generator, export_of(make_model(shape, device, dtype), 0), "in_process")
        seeds = np.random.default_rng(0)

        def seconds(num: int, num_tokens: int) -> float:
            texts = prompts(num, sequences[num], SHAPES[shape]["vocab_size"], int(seeds.integers(2**31)))
            request = GenerateRequest(
                prompts=RaggedTokens.from_lists(texts),
                num_samples=1,
                seeds=seeds.integers(0, 2**31, num),
                max_tokens=np.full(num, num_tokens, np.int32),
                sampling=SamplingParams(),
                weight_version=0,
            )
            start = time.perf_counter()
            generator.generate(request)
            return time.perf_counter() - start

        found: dict[str, Any] = {}
        for num in sequences:
            seconds(num, lengths[0])
            short, long = (min(seconds(num, length) for _ in range(2)) for length in lengths)
            found[str(num)] = 1e3 * (long - short) / (lengths[1] - lengths[0])
        if num_kernels:
            found["kernels"] = kernels(lambda: seconds(PROFILED, lengths[1]), num_kernels, lengths[1])
        generator.close(CloseRequest())
    return found


def kernels(work: Any, num: int, num_steps: int) -> list[tuple[str, float, float]]:
    """Names, milliseconds a step and calls a step of the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    averages = sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total)[:num]
    return [(one.key[:90], one.self_device_time_total / 1e3 / num_steps, one.count / num_steps) for one in averages]


def floors(shape: str, device: str, options: dict[str, Any]) -> dict[str, float]:
    """Return the lower bound by memory bandwidth in milliseconds, by the number of sequences."""
    rate = copy_bandwidth(device)
    embedding = SHAPES[shape]["vocab_size"] * SHAPES[shape]["hidden_size"]
    bytes_of = {name: 1 if options.get(name, "none").startswith("fp8") else 2 for name in ("quantization", "kv_cache_dtype")}
    weights = (num_parameters(shape) - 2 * embedding) * bytes_of["quantization"] + 2 * embedding  # 2 bytes of the head alone
    cache = kv_bytes_per_token(shape, bytes_of["kv_cache_dtype"])
    return {str(num): 1e3 * (weights + num * length * cache) / rate for num, length in SEQUENCES.items()}


def main() -> None:
    parser = row_parser(__doc__, 240.0, settings=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--kernels", type=int, default=0, help="longest kernels of a step that are listed")
    arguments = parser.parse_args()
    shape = "tiny" if arguments.quick else arguments.shape
    options = parse_options(arguments.set)
    if arguments.row:
        finish(measure(arguments.row, shape, arguments.device, options, arguments.kernels))
        return
    require_device(arguments.device)
    print(f"{versions(arguments.device)}; {shape}, {options or 'bfloat16'}; milliseconds of a step by the number of sequences")
    sequences = ["1", "8"] if shape == "tiny" else [str(num) for num in SEQUENCES]
    print(f"{'':28}" + "".join(f"{num:>8}" for num in sequences))
    if shape != "tiny":
        lowest = floors(shape, arguments.device, options)
        print(f"{'memory floor':28}" + "".join(f"{lowest[num]:>8.2f}" for num in sequences))
    for row in arguments.rows:
        found = run_row(__file__, row, arguments.limit)
        if "failed" in found:
            print(f"{row:28} {found['failed']}", flush=True)
            continue
        print(f"{row:28}" + "".join(f"{found[num]:>8.2f}" for num in sequences), flush=True)
        for name, milliseconds, calls in found.get("kernels", []):
            print(f"    {milliseconds:8.3f} ms {calls:7.1f} x  {name}")


if __name__ == "__main__":
    main()
