"""Tokens per second of the generator `vllm`, with log-probabilities, against plain `LLM.generate` in the same run.

    python benchmarks/generation.py
    python benchmarks/generation.py --rows plain "1 replica" --set max_num_seqs=512
    python benchmarks/generation.py --quick --device cpu        # a tiny shape, to try the script

1,024 samples of exactly 512 tokens at temperature 1, from a 1.5B Qwen2 shape with random weights in bfloat16: of 1,024
different prompts of 128 tokens (`distinct`), and of 128 prompts, 8 samples each (`groups`). Every row has a process of its own,
and no prefix is cached from an earlier generation. rlcore's engines start without weights and get them by a refit; each sample
has its own seed, and the result is arrays of tokens, log-probabilities and weight versions. `plain` is `LLM.generate` with the
arguments that rlcore starts its engine with, and `plain, defaults` with vLLM's own for CUDA graphs; its outputs are left as the
objects that it returns. Ratios are to `plain` with log-probabilities.

A row of `2 devices`, which has to be named, is one engine over both (`tensor_parallel = 2`), with log-probabilities in a table
on one of them. It leaves NVLink multicast off.

In rows of a `stream` the same samples are asked for one by one and come back as they end, checked and with their texts: the
way of a run's episodes. In the others one call returns them all.

The memory floor of a step is its weights, read once, and the keys and values of all sequences at their mean length, at the rate
of a copy on this device.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from attrs import frozen
from generator_setup import (
    copy_bandwidth,
    export_of,
    finish,
    make_generator,
    parse_options,
    plain_arguments,
    refit,
    row_parser,
    run_row,
    versions,
)
from model_shapes import SHAPES, kv_bytes_per_token, make_model, num_parameters, prompts, require_device, write_config

from rlcore.config.recipe import ModelConfig
from rlcore.run.execution.streams import run_stream
from rlcore.spi import CloseRequest, GenerateRequest, RaggedTokens, SamplingParams
from rlcore_rollout.episode import Completion, CompletionRequest
from rlcore_rollout.request_queue import RequestQueue
from rlcore_text.tokenizers.tokenizer import load_tokenizer

ROWS = (
    "floor",
    "plain",
    "plain, defaults",
    "1 replica",
    "1 replica, stream",
    "1 replica, in process",
    "1 replica, in process, stream",
    "2 replicas",
    "4 replicas",
    "1 replica, 2 devices",
)
PLAIN = {"no logprobs": (False, False), "logprobs": (True, False), "logprobs, seeds": (True, True)}
"""Variants of the baseline: log-probabilities, per-sample seeds."""
WARM_UP = 99
MEMORY = {"cpu": {}, "cuda": {"gpu_memory_utilization": 0.8}}
"""Nothing else needs the device."""
WITHOUT_MULTICAST = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
"""Arguments of vLLM: its fused all-reduce takes multicast, and hangs where fabric and driver disagree about it."""


@frozen(kw_only=True)
class Work:
    """Of one generation."""

    shape: str
    device: str
    num_samples: int
    group: int
    prompt_length: int
    num_tokens: int
    repeats: int

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def max_length(self) -> int:
        return self.prompt_length + self.num_tokens

    def workloads(self) -> dict[str, int]:
        """Samples of a prompt."""
        return {"distinct": 1, "groups": self.group}

    def prompts(self, num_samples_per_prompt: int, turn: int) -> list[list[int]]:
        """Others for each turn, so that no prefix is cached."""
        num_prompts = self.num_samples // num_samples_per_prompt
        seed = turn * 100 + num_samples_per_prompt
        return prompts(num_prompts, self.prompt_length, SHAPES[self.shape]["vocab_size"], seed)


def tokens_per_second(work: Work, generate: Callable[[list[list[int]], int, int], int]) -> dict[str, float]:
    """By workload. `generate(prompts, samples of each, tokens)` returns how many tokens there are."""
    found = {}
    generate(work.prompts(1, WARM_UP), 1, min(16, work.num_tokens))
    for turn, (name, group) in enumerate(work.workloads().items()):
        rates = []
        for repeat in range(work.repeats):
            texts = work.prompts(group, turn * 10 + repeat)
            start = time.perf_counter()
            num_tokens = generate(texts, group, work.num_tokens)
            rates.append(num_tokens / (time.perf_counter() - start))
            if num_tokens != work.num_samples * work.num_tokens:
                raise RuntimeError(f"found {num_tokens} tokens; expected {work.num_samples} x {work.num_tokens}")
        found[name] = median(rates)
    return found


def measure_rlcore(row: str, work: Work, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    count, *how = row.split(", ")
    replicas = int(count.split()[0])
    channel = "in_process" if "in process" in how else "cuda_ipc" if work.device == "cuda" else "shared_memory"
    write_config(directory, work.shape, work.dtype)
    settings = {"replicas": replicas, "max_num_seqs": -(-work.num_samples // replicas), **MEMORY[work.device], **options}
    if "2 devices" in how:
        settings |= over_two_devices(work.device, options.get("engine", {}))
    start = time.perf_counter()
    generator = make_generator("vllm", directory, work.device, work.dtype, channel, work.max_length, settings)
    start_s = time.perf_counter() - start
    model = make_model(work.shape, work.device, work.dtype)
    refit(generator, export_of(model, 0), channel)
    seeds = np.random.default_rng(1)

    def generate(texts: list[list[int]], group: int, num_tokens: int) -> int:
        num_samples = len(texts) * group
        result = generator.generate(
            GenerateRequest(
                prompts=RaggedTokens.from_lists(texts),
                num_samples=group,
                seeds=seeds.integers(0, 2**31, num_samples),
                max_tokens=np.full(num_samples, num_tokens, np.int32),
                sampling=SamplingParams(),
                weight_version=0,
            )
        )
        return len(result.tokens)

    tokenizer = load_tokenizer(ModelConfig(path=str(directory)))

    def stream(texts: list[list[int]], group: int, num_tokens: int) -> int:
        found: list[Completion] = []

        def on_completions(samples: Sequence[Completion]) -> None:
            found.extend(samples)
            if len(found) == len(texts) * group:
                feed.end()

        feed = RequestQueue(on_completions)
        feed.begin(0)
        for text in texts:
            prompt, sampling = np.array(text, np.int32), SamplingParams()
            drawn = seeds.integers(0, 2**31, group).tolist()
            feed.ask(
                [
                    CompletionRequest(prompt=prompt, seed=seed, max_tokens=num_tokens, sampling=sampling, owner=None)
                    for seed in drawn
                ]
            )
        run_stream(generator, tokenizer, feed, 0)
        return sum(len(sampled.tokens) for sampled in found)

    rates = {"logprobs, seeds": tokens_per_second(work, stream if "stream" in how else generate)}
    generator.close(CloseRequest())
    return {"rates": rates, "start_s": start_s}


def over_two_devices(device: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Options of `[generator.vllm]` for one engine over both, beside vLLM's own arguments `engine`."""
    if device == "cpu":
        return {"tensor_parallel": 2, "engine": engine}
    os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    return {"tensor_parallel": 2, "devices": [0, 1], "engine": {**WITHOUT_MULTICAST, **engine}}


def measure_plain(row: str, work: Work, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm import SamplingParams as EngineSampling

    write_config(directory, work.shape, work.dtype)
    settings = {"max_num_seqs": work.num_samples, **MEMORY[work.device], **options}
    arguments = plain_arguments(directory, work.device, work.dtype, work.max_length, settings)
    if row.endswith("defaults"):
        arguments.pop("max_cudagraph_capture_size", None)
    start = time.perf_counter()
    engine = LLM(**arguments)
    start_s = time.perf_counter() - start
    random = np.random.default_rng(1)

    def measured(logprobs: bool, seeded: bool) -> dict[str, float]:
        def generate(texts: list[list[int]], group: int, num_tokens: int) -> int:
            sampling = [
                EngineSampling(
                    n=group,
                    temperature=1.0,
                    max_tokens=num_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=0 if logprobs else None,
                    seed=int(random.integers(0, 2**31)) if seeded else None,
                )
                for _ in texts
            ]
            outputs = engine.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
            return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

        return tokens_per_second(work, generate)

    # A variant meets the prompts of the one before it, so what is cached of those is dropped.
    rates = {}
    for name, (logprobs, seeded) in PLAIN.items():
        engine.reset_prefix_cache()
        rates[name] = measured(logprobs, seeded)
    return {"rates": rates, "start_s": start_s}


def measure_floor(work: Work) -> dict[str, Any]:
    bytes_per_number = 2 if work.device == "cuda" else 4
    mean_length = work.prompt_length + work.num_tokens / 2
    cache = work.num_samples * mean_length * kv_bytes_per_token(work.shape, bytes_per_number)
    step_bytes = num_parameters(work.shape) * bytes_per_number + cache
    bandwidth = copy_bandwidth(work.device)
    rate = work.num_samples * bandwidth / step_bytes
    print(f"a step reads {step_bytes / 1e9:.1f} GB; a copy moves {bandwidth / 1e12:.2f} TB/s")
    return {"rates": {f"at {bandwidth / 1e12:.2f} TB/s": dict.fromkeys(work.workloads(), rate)}, "start_s": 0.0}


def report(found: dict[str, dict[str, Any]], work: Work) -> None:
    names = tuple(work.workloads())
    base = found.get("plain", {}).get("rates", {}).get("logprobs", {})
    heads = "".join(f"{f'{name} tok/s':>18}{'× plain':>9}" for name in names)
    print(f"{'':32}{'':18}{heads}{'start s':>10}")
    for row, result in found.items():
        if "failed" in result:
            print(f"{row:32}{result['failed']}")
            continue
        for variant, rates in result["rates"].items():
            columns = "".join(f"{rates[name]:18,.0f}{rates[name] / base.get(name, float('nan')):9.2f}" for name in names)
            print(f"{row:32}{variant:18}{columns}{result['start_s']:10.1f}")


def main() -> None:
    parser = row_parser(__doc__, 300.0, settings=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[row for row in ROWS if "2 devices" not in row])
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--repeats", type=int, default=1, help="generations that each figure is the median of")
    arguments = parser.parse_args()
    sizes = {"num_samples": 1024, "group": 8, "prompt_length": 128, "num_tokens": 512, "shape": arguments.shape}
    if arguments.quick:
        sizes = {"num_samples": 32, "group": 4, "prompt_length": 16, "num_tokens": 24, "shape": "tiny"}
    work = Work(device=arguments.device, repeats=arguments.repeats, **sizes)
    require_device(arguments.device)
    if arguments.row:
        if arguments.row == "floor":
            finish(measure_floor(work))
        measure = measure_plain if arguments.row.startswith("plain") else measure_rlcore
        with tempfile.TemporaryDirectory() as scratch:
            result = measure(arguments.row, work, Path(scratch), parse_options(arguments.set))
        finish(result)
    found = {row: run_row(__file__, row, arguments.limit) for row in arguments.rows}
    size = (
        f"{work.num_samples} samples of {work.num_tokens} tokens after {work.prompt_length}, {work.group} of a prompt in groups"
    )
    print(f"{versions(arguments.device)}; {work.shape}, {size}; {os.cpu_count()} cores; {arguments.set}")
    report(found, work)


if __name__ == "__main__":
    main()
