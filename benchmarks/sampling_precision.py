"""How far log-probabilities of the generator `vllm` in bfloat16 are from those of its weights, with and without a float32 head.

    python benchmarks/sampling_precision.py
    python benchmarks/sampling_precision.py --quick --device cpu       # a tiny shape, to try the script

Random weights of a 1.5B Qwen2 shape with a standard deviation of 0.02, whose logits are narrow, and the same with the last
norm ten times as large, whose logits are as wide as a trained model's. An engine samples at each temperature; the same device
then computes the samples' log-probabilities from the same weights with transformers in bfloat16, with the head's product in
float32 (`float32 head`) and in bfloat16 (`bfloat16 head`). Rows are the engine's head: `model` is vLLM's own, in bfloat16, and
`float32` is what rlcore sets. `error` is the mean of exp(|generation - reference|), the metric token_mult_prob_error, and
`mean` and `max` are of the absolute difference. Engines start without compiled graphs, which do not contain the head.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from generator_setup import export_of, finish, make_generator, parse_options, refit, row_parser, run_row, versions
from model_shapes import SHAPES, make_model, prompts, require_device, write_config

from rlcore.spi import CloseRequest, GenerateRequest, GenerateResult, RaggedTokens, SamplingParams

ROWS = ("model", "float32")
WIDTHS = {"narrow": 1.0, "wide": 10.0}
"""Factor of the last norm."""
TEMPERATURES = (0.7, 1.0)
HEADS = ("float32 head", "bfloat16 head")
CHUNK = 512
"""Rows of logits that the reference holds at a time."""


def measure(head: str, device: str, quick: bool, directory: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One engine; a figure for each width, temperature and head of the reference."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    shape, num_samples, length = ("tiny", 8, 16) if quick else ("1.5b", 256, 256)
    channel = "cuda_ipc" if device == "cuda" else "in_process"
    write_config(directory, shape, "bfloat16")
    settings = {"enforce_eager": True, "max_num_seqs": num_samples, "engine": {"hf_overrides": {"head_dtype": head}}, **options}
    if device == "cuda":
        settings["gpu_memory_utilization"] = 0.4
    generator = make_generator("vllm", directory, device, "bfloat16", channel, 2 * length, settings)
    model = make_model(shape, device, "bfloat16").eval()
    texts = prompts(num_samples, length // 4, SHAPES[shape]["vocab_size"])
    found = []
    for version, (width, factor) in enumerate(WIDTHS.items()):
        model.model.norm.weight.data.fill_(factor)
        refit(generator, export_of(model, version), channel)
        for temperature in TEMPERATURES:
            result = generator.generate(
                GenerateRequest(
                    prompts=RaggedTokens.from_lists(texts),
                    num_samples=1,
                    seeds=np.arange(num_samples),
                    max_tokens=np.full(num_samples, length, np.int32),
                    sampling=SamplingParams(temperature=temperature),
                    weight_version=version,
                )
            )
            for name, reference in zip(HEADS, reference_logprobs(model, texts, result, temperature), strict=True):
                difference = np.abs(result.logprobs - reference).astype(np.float64)
                found.append(
                    {
                        "width": width,
                        "temperature": temperature,
                        "head": name,
                        "error": float(np.exp(difference).mean()),
                        "mean": float(difference.mean()),
                        "max": float(difference.max()),
                    }
                )
    generator.close(CloseRequest())
    return found


def reference_logprobs(model: Any, texts: list[list[int]], result: GenerateResult, temperature: float) -> list[np.ndarray]:
    """float32 [T] for each of HEADS."""
    import torch

    columns: list[list[np.ndarray]] = [[] for _ in HEADS]
    weight = model.lm_head.weight.detach()
    with torch.inference_mode():
        for hidden, targets in _hidden_states(model, texts, result):
            for column, logits in zip(columns, (hidden.float() @ weight.float().T, hidden @ weight.T), strict=True):
                logprobs = (logits.float() / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
                column.append(logprobs.cpu().numpy())
    return [np.concatenate(column) for column in columns]


def _hidden_states(model: Any, texts: list[list[int]], result: GenerateResult) -> Iterator[tuple[Any, Any]]:
    """At most CHUNK of a sample's tokens: the hidden states [C, H] before them, and the tokens int64 [C]."""
    import torch

    for index, text in enumerate(texts):
        response = result.tokens[result.offsets[index] : result.offsets[index + 1]].tolist()
        tokens = torch.tensor([[*text, *response]], device=model.device)
        hidden = model.model(tokens).last_hidden_state[0, len(text) - 1 : -1]
        yield from zip(hidden.split(CHUNK), tokens[0, len(text) :].split(CHUNK), strict=True)


def report(found: dict[str, dict[str, Any]]) -> None:
    print(f"{'engine head':13}{'logits':9}{'T':>5}  {'reference':16}{'error':>10}{'mean':>11}{'max':>9}")
    for row, result in found.items():
        if "failed" in result:
            print(f"{row:13}{result['failed']}")
            continue
        for one in result["found"]:
            figures = f"{one['error']:10.5f}{one['mean']:11.2e}{one['max']:9.4f}"
            print(f"{row:13}{one['width']:9}{one['temperature']:5.1f}  {one['head']:16}{figures}")


def main() -> None:
    parser = row_parser(__doc__, 200.0, settings=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    require_device(arguments.device)
    if arguments.row:
        with tempfile.TemporaryDirectory() as scratch:
            options = parse_options(arguments.set)
            finish({"found": measure(arguments.row, arguments.device, arguments.quick, Path(scratch), options)})
    found = {row: run_row(__file__, row, arguments.limit) for row in arguments.rows}
    print(versions(arguments.device))
    report(found)


if __name__ == "__main__":
    main()
