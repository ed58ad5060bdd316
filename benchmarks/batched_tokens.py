"""What `max_num_batched_tokens` of the generator `vllm` does for generation, and for a refit while it generates.

    python benchmarks/batched_tokens.py
    python benchmarks/batched_tokens.py --rows 8192 --length 2048
    python benchmarks/batched_tokens.py --quick --device cpu           # a tiny shape, to try the script

Rows are most tokens that an engine computes in a step; 2048 is what vLLM takes where nothing is said. Tokens a second of
1,024 samples of exactly 512 tokens from a 1.5B Qwen2 shape with random weights in bfloat16: of 1,024 different prompts of 128
tokens (`distinct`), and of 128 prompts with 8 samples each (`groups`); and of 1,024 samples of 64 tokens after prompts of
`--length` tokens (`long prompts`). `refit s` is the time of a refit at a third and at two thirds of the distinct work, and
`cost s` what each makes that work longer: all that is running is computed anew under the new weights. `cost s` is the
difference of two measured times, and can be noise where it is small. Each row has a process of its own, and no prefix is
cached from an earlier generation.
"""

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen
from generator_setup import export_of, finish, make_generator, parse_options, refit, row_parser, run_row, versions
from model_shapes import SHAPES, make_model, prompts, require_device, write_config

from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.spi import CloseRequest, GenerateRequest, RaggedTokens, SamplingParams

ROWS = ("2048", "8192", "16384")
COLUMNS = ("distinct", "groups", "long prompts")
WARM_UP, REFITTED = 90, 91
"""Of the prompts' seeds."""


@frozen(kw_only=True)
class Work:
    """Samples of one generation."""

    shape: str
    num_samples: int
    group: int
    prompt_length: int
    num_tokens: int

    def request(self, seed: int, weight_version: int) -> GenerateRequest:
        """Prompts that no other seed has."""
        texts = prompts(self.num_samples // self.group, self.prompt_length, SHAPES[self.shape]["vocab_size"], seed)
        return GenerateRequest(
            prompts=RaggedTokens.from_lists(texts),
            num_samples=self.group,
            seeds=np.arange(self.num_samples),
            max_tokens=np.full(self.num_samples, self.num_tokens, np.int32),
            sampling=SamplingParams(),
            weight_version=weight_version,
        )


def seconds(generator: GeneratorHandle, work: Work, seed: int, weight_version: int) -> float:
    """Of one generation."""
    request = work.request(seed, weight_version)
    start = time.perf_counter()
    result = generator.generate(request)
    found = time.perf_counter() - start
    if len(result.tokens) != work.num_samples * work.num_tokens:
        raise RuntimeError(f"found {len(result.tokens)} tokens; expected {work.num_samples} x {work.num_tokens}")
    return found


def measure(row: str, works: dict[str, Work], device: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    work = works["distinct"]
    dtype, channel = ("bfloat16", "cuda_ipc") if device == "cuda" else ("float32", "in_process")
    write_config(directory, work.shape, dtype)
    memory = {"gpu_memory_utilization": 0.8} if device == "cuda" else {}
    settings = {"max_num_seqs": work.num_samples, "max_num_batched_tokens": int(row), **memory, **options}
    longest = max(one.prompt_length + one.num_tokens for one in works.values())
    start = time.perf_counter()
    generator = make_generator("vllm", directory, device, dtype, channel, longest, settings)
    start_s = time.perf_counter() - start
    model = make_model(work.shape, device, dtype)
    refit(generator, export_of(model, 0), channel)
    seconds(generator, evolve(work, num_tokens=16), WARM_UP, 0)
    rates, undisturbed_s = {}, 0.0
    for seed, name in enumerate(COLUMNS):
        one = works[name]
        taken = seconds(generator, one, seed, 0)
        undisturbed_s = taken if name == "distinct" else undisturbed_s
        rates[name] = one.num_samples * one.num_tokens / taken
    refits, disturbed_s = refitted(generator, work, model, channel, undisturbed_s)
    generator.close(CloseRequest())
    cost_s = (disturbed_s - undisturbed_s) / len(refits)
    return {"rates": rates, "refit_s": refits, "cost_s": cost_s, "start_s": start_s}


def refitted(
    generator: GeneratorHandle, work: Work, model: Any, channel: str, undisturbed_s: float
) -> tuple[list[float], float]:
    """Seconds of two refits while the work is under way, and of the work."""
    taken: list[float] = []
    thread = threading.Thread(target=lambda: taken.append(seconds(generator, work, REFITTED, 0)))
    thread.start()
    refits = []
    for weight_version in (1, 2):
        time.sleep(undisturbed_s / 3)
        start = time.perf_counter()
        refit(generator, export_of(model, weight_version), channel)
        refits.append(time.perf_counter() - start)
    thread.join()
    return refits, taken[0]


def report(found: dict[str, dict[str, Any]]) -> None:
    print(
        "".join([f"{'most tokens':>12}", *(f"{name:>16}" for name in COLUMNS), f"{'refit s':>16}{'cost s':>9}{'start s':>9}"])
    )
    for row, result in found.items():
        if "failed" in result:
            print(f"{row:>12}  {result['failed']}")
            continue
        rates = "".join(f"{result['rates'][name]:16,.0f}" for name in COLUMNS)
        refits = ", ".join(f"{one:.2f}" for one in result["refit_s"])
        print(f"{row:>12}{rates}{refits:>16}{result['cost_s']:9.2f}{result['start_s']:9.1f}")


def main() -> None:
    parser = row_parser(__doc__, 300.0, settings=True)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="TOKENS")
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--length", type=int, default=1024, help="of the long prompts, in tokens")
    arguments = parser.parse_args()
    require_device(arguments.device)
    distinct = Work(shape=arguments.shape, num_samples=1024, group=1, prompt_length=128, num_tokens=512)
    long = evolve(distinct, prompt_length=arguments.length, num_tokens=64)
    if arguments.quick:
        distinct = Work(shape="tiny", num_samples=32, group=1, prompt_length=16, num_tokens=96)
        long = evolve(distinct, prompt_length=64, num_tokens=8)
    works = {"distinct": distinct, "groups": evolve(distinct, group=8), "long prompts": long}
    if arguments.row:
        with tempfile.TemporaryDirectory() as scratch:
            finish(measure(arguments.row, works, arguments.device, Path(scratch), parse_options(arguments.set)))
    found = {row: run_row(__file__, row, arguments.limit) for row in arguments.rows}
    print(f"{versions(arguments.device)}; {distinct.shape}, {distinct.num_samples} samples of {distinct.num_tokens} tokens")
    report(found)


if __name__ == "__main__":
    main()
