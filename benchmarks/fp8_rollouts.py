"""Tokens per second of the generator `vllm` in 8 bits against bfloat16 in the same run, seconds of a refit, and the rounding.

    python benchmarks/fp8_rollouts.py                          # the 8B shape, one H100
    python benchmarks/fp8_rollouts.py --shape 30b-a3b --rows bfloat16 fp8
    python benchmarks/fp8_rollouts.py --quick --device cpu     # a tiny shape in float32 alone, to try the script

Each row is an engine in a process of its own, refitted twice with random weights in bfloat16, which are made anew for
each bucket, so that no trainer takes memory. `--samples` different prompts of 128 tokens get `--tokens` tokens each at
temperature 1, with log-probabilities. Then a transformers model with the same weights, in bfloat16, computes the
log-probabilities of 8 samples, where it fits beside the engine: the mean over tokens of exp |generator - model|,
`token_mult_prob_error`.
"""

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from generator_setup import (
    GIB,
    finish,
    make_generator,
    parse_options,
    refit,
    row_parser,
    run_row,
    synchronize,
    used_bytes,
    versions,
)
from model_shapes import config_of, make_model, num_parameters, prompts, require_device, write_config

from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.spi import (
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    RaggedTokens,
    SamplingParams,
    TensorSpec,
    WeightBucket,
    WeightExport,
)

ROWS: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "fp8": {"quantization": "fp8"},
    "fp8, fp8 cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "fp8_per_block, fp8 cache": {"quantization": "fp8_per_block", "kv_cache_dtype": "fp8"},
}
PROMPT_LENGTH = 128
NUM_COMPARED = 8
LARGEST_MODEL = 20 * GIB
"""That is computed with beside an engine."""


@frozen(kw_only=True)
class Work:
    """What every row does."""

    shape: str
    device: str
    num_samples: int
    num_tokens: int

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def max_length(self) -> int:
        return PROMPT_LENGTH + self.num_tokens


def empty_model(work: Work) -> Any:
    """The transformers model without its numbers."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(work.shape), dtype=getattr(torch, work.dtype))


def random_weights(work: Work, model: Any) -> Iterator[tuple[str, Any]]:
    """Name and tensor of each parameter as transformers has it, the same in every row."""
    import torch

    generator = torch.Generator(work.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        tensor = torch.empty_like(parameter, device=work.device)
        yield name, tensor.fill_(1.0) if parameter.ndim == 1 else tensor.normal_(0, 0.02, generator=generator)


def export_of(work: Work, weight_version: int) -> WeightExport:
    """Random weights under the names of a checkpoint, one of the model's parameters a bucket."""
    from transformers.core_model_loading import revert_weight_conversion

    from rlcore_torchkit.refit.buckets import make_buckets

    model = empty_model(work)
    specs = tuple(
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=work.dtype)
        for each in model.named_parameters()
        for name, tensor in revert_weight_conversion(model, dict([each])).items()
    )

    def buckets() -> Iterator[WeightBucket]:
        for each in random_weights(work, model):
            converted = revert_weight_conversion(model, dict([each]))
            yield from make_buckets([(name, tensor.contiguous()) for name, tensor in converted.items()], GIB)

    return WeightExport(weight_version=weight_version, specs=specs, buckets=buckets(), persistent=False)


def generate(generator: GeneratorHandle, work: Work, texts: list[list[int]], num_tokens: int) -> GenerateResult:
    return generator.generate(
        GenerateRequest(
            prompts=RaggedTokens.from_lists(texts),
            num_samples=1,
            seeds=np.arange(len(texts)),
            max_tokens=np.full(len(texts), num_tokens, np.int32),
            sampling=SamplingParams(),
            weight_version=1,
        )
    )


def mean_error(work: Work, texts: list[list[int]], result: GenerateResult) -> float:
    """token_mult_prob_error of samples of one length."""
    import torch

    model = make_model(work.shape, work.device, work.dtype).eval()
    for (_, tensor), parameter in zip(random_weights(work, model), model.parameters(), strict=True):
        parameter.data.copy_(tensor)
    responses = torch.from_numpy(result.tokens.reshape(len(texts), -1)).to(work.device).long()
    tokens = torch.cat([torch.tensor(texts, device=work.device), responses], dim=1)
    with torch.no_grad():
        logits = model(tokens).logits[:, PROMPT_LENGTH - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0].cpu().numpy()
    return float(np.exp(np.abs(expected - result.logprobs.reshape(expected.shape))).mean())


def measure(row: str, work: Work, directory: Path, options: dict[str, Any]) -> dict[str, float]:
    channel = "cuda_ipc" if work.device == "cuda" else "in_process"
    write_config(directory, work.shape, work.dtype)
    fits = 2 * num_parameters(work.shape) < LARGEST_MODEL
    share = {"gpu_memory_utilization": 0.6 if fits else 0.9} if work.device == "cuda" else {}
    settings = {"max_num_seqs": work.num_samples, **share, **ROWS[row], **options}
    start = time.perf_counter()
    generator = make_generator("vllm", directory, work.device, work.dtype, channel, work.max_length, settings)
    found = {"start": time.perf_counter() - start}
    for weight_version in range(2):
        export = export_of(work, weight_version)
        synchronize(work.device)
        start = time.perf_counter()
        refit(generator, export, channel)
        found["refit"] = time.perf_counter() - start
    vocabulary = config_of(work.shape).vocab_size
    texts = prompts(work.num_samples, PROMPT_LENGTH, vocabulary)
    generate(generator, work, prompts(work.num_samples, PROMPT_LENGTH, vocabulary, seed=1), 8)
    start = time.perf_counter()
    result = generate(generator, work, texts, work.num_tokens)
    found["rate"] = len(result.tokens) / (time.perf_counter() - start)
    found["gib"] = used_bytes() / GIB
    compared = texts[:NUM_COMPARED]
    result = generate(generator, work, compared, work.num_tokens)
    gc.collect()
    found["error"] = mean_error(work, compared, result) if fits else float("nan")
    generator.close(CloseRequest())
    return found


def report(found: dict[str, dict[str, Any]]) -> None:
    base = found.get("bfloat16", {}).get("rate", float("nan"))
    print(f"{'':28}{'tokens/s':>12}{'× bfloat16':>12}{'refit s':>10}{'error':>10}{'start s':>10}{'GiB':>8}")
    for row, result in found.items():
        if "failed" in result:
            print(f"{row:28}{result['failed']}")
            continue
        rate, relative = result["rate"], result["rate"] / base
        print(
            f"{row:28}{rate:12,.0f}{relative:12.2f}{result['refit']:10.2f}{result['error']:10.4f}"
            f"{result['start']:10.1f}{result['gib']:8.1f}"
        )


def main() -> None:
    parser = row_parser(__doc__, 300.0, settings=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    shape, num_samples, num_tokens = arguments.shape, arguments.samples, arguments.tokens
    if arguments.quick:
        shape, num_samples, num_tokens = "tiny-moe" if shape == "30b-a3b" else "tiny", 16, 16
    work = Work(shape=shape, device=arguments.device, num_samples=num_samples, num_tokens=num_tokens)
    require_device(arguments.device)
    if arguments.row:
        with tempfile.TemporaryDirectory() as scratch:
            result = measure(arguments.row, work, Path(scratch), parse_options(arguments.set))
        finish(result)
    rows = arguments.rows or (list(ROWS) if arguments.device == "cuda" else ["bfloat16"])
    found: dict[str, dict[str, Any]] = {}
    print(f"{versions(arguments.device)}; {shape}, {num_samples} samples of {num_tokens} tokens after {PROMPT_LENGTH}")
    for row in rows:
        found[row] = run_row(__file__, row, arguments.limit)
        report({row: found[row]})  # a run that is cut off keeps what it has measured
    report(found)


if __name__ == "__main__":
    main()
