"""Tokens per second of the generator `vllm` at the tail of a step, where few sequences are left, with and without speculation.

    python benchmarks/speculative.py
    python benchmarks/speculative.py --rows none ngram --batches 1 16 --set max_num_batched_tokens=4096
    python benchmarks/speculative.py --quick --device cpu        # a tiny shape, to try the script

The task is as repetitive as the model: the weights are random, but attention and MLPs add nothing to the residual stream, and
the head is the embedding, scaled so that each token comes again with a probability of about 0.9. The work of a step is that of
any model of the shape. The drafter of the row `draft_model` has one layer, and repeats itself in the same way. `logprob` is how
far the recorded log-probabilities are at most from the model's own, which are known in closed form; `repeated` is the share of
tokens that are the one before them; `accepted` is the mean acceptance length, the tokens that a guess brings with the one that
the model then samples itself. Each row has a process of its own, and each batch is generated twice, of which the second time
counts.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from generator_setup import export_of, finish, make_generator, parse_options, refit, row_parser, run_row, versions
from model_shapes import SHAPES, make_model, prompts, require_device, write_config

from rlcore.spi import CloseRequest, GenerateRequest, GenerateResult, RaggedTokens, SamplingParams

ROWS = ("none", "ngram", "draft_model")
GUESSED = 4
"""Tokens that are guessed at a time."""
DRAFTER_LAYERS = 1
BATCHES = (1, 4, 16)
REPEATED = 0.9
"""Probability that a token comes again."""


def make_repetitive(model: Any) -> None:
    """Let each token be followed by itself, with a probability of about REPEATED."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        embedding = model.get_input_embeddings().weight
        model.lm_head.weight.copy_(embedding)
        weights = embedding[:64].float()
        own = (weights.square().mean(-1, keepdim=True).rsqrt() * weights * weights).sum(-1).mean()
        wanted = torch.log(torch.tensor(REPEATED / (1 - REPEATED) * embedding.shape[0]))
        model.model.norm.weight.fill_(float(wanted / own))


def guesses(row: str, shape: str, device: str, dtype: str, directory: Path) -> dict[str, Any]:
    """The keys of a row's guesses, and for "draft_model" the drafter, written below the model's directory."""
    if row == "none":
        return {}
    if row == "ngram":
        return {"speculative_ngram": GUESSED}
    drafter = make_model(shape, device, dtype, num_hidden_layers=DRAFTER_LAYERS)
    make_repetitive(drafter)
    drafter.save_pretrained(directory / "drafter")
    return {"speculative_model": str(directory / "drafter"), "speculative_tokens": GUESSED}


def logprob_error(model: Any, texts: list[list[int]], result: GenerateResult) -> float:
    """The largest difference in nats from the model itself, of the first samples."""
    import torch

    found = 0.0
    with torch.inference_mode():
        for index, text in enumerate(texts[:4]):
            part = slice(result.offsets[index], result.offsets[index + 1])
            tokens = torch.tensor([*text, *result.tokens[part].tolist()], device=model.device)
            # Nothing but the embedding of the token before decides.
            hidden = model.model.norm(model.get_input_embeddings()(tokens[len(text) - 1 : -1]))
            logits = hidden.float() @ model.lm_head.weight.float().T
            expected = logits.log_softmax(-1).gather(-1, tokens[len(text) :, None])[:, 0].cpu().numpy()
            found = max(found, float(np.abs(expected - result.logprobs[part]).max()))
    return found


def measure(row: str, device: str, quick: bool, batches: list[int], directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """One engine; figures for each batch."""
    shape, length, dtype = ("tiny", 32, "float32") if quick else ("8b", 512, "bfloat16")
    channel = "cuda_ipc" if device == "cuda" else "in_process"
    write_config(directory, shape, dtype)
    settings = {
        "max_num_seqs": max(batches),
        "gpu_memory_utilization": 0.4,
        **guesses(row, shape, device, dtype, directory),
        **options,
    }
    if quick:
        settings |= {"cpu_kv_cache_gib": 0.1}
    start = time.perf_counter()
    generator = make_generator("vllm", directory, device, dtype, channel, 2 * length, settings)
    start_s = time.perf_counter() - start
    model = make_model(shape, device, dtype).eval()
    make_repetitive(model)
    refit(generator, export_of(model, 0), channel)
    found = {}
    for version, batch in enumerate(batches):
        texts = prompts(batch, length // 4, SHAPES[shape]["vocab_size"])
        for attempt in range(2):
            request = GenerateRequest(
                prompts=RaggedTokens.from_lists(texts),
                num_samples=1,
                seeds=np.arange(batch) + attempt * batch,
                max_tokens=np.full(batch, length, np.int32),
                sampling=SamplingParams(),
                weight_version=version,
            )
            start = time.perf_counter()
            result = generator.generate(request)
            seconds = time.perf_counter() - start
        drafts = refit(generator, export_of(model, version + 1), channel).drafts
        before = np.concatenate([[texts[0][-1]], result.tokens[:-1]])
        found[str(batch)] = {
            "tokens_per_s": len(result.tokens) / seconds,
            "logprob": logprob_error(model, texts, result),
            "repeated": float((result.tokens == before).mean()),
            "accepted": 1.0 + (drafts.num_accepted_tokens / max(drafts.num_drafts, 1) if drafts else 0.0),
        }
    generator.close(CloseRequest())
    return {"found": found, "start_s": start_s}


def report(row: str, result: dict[str, Any], base: dict[str, Any]) -> None:
    """The lines of a row, against those of the row without guesses where it came before."""
    if "failed" in result:
        print(f"{row:14}{result['failed']}", flush=True)
        return
    for batch, one in result["found"].items():
        ratio = one["tokens_per_s"] / base[batch]["tokens_per_s"] if batch in base else float("nan")
        figures = (
            f"{one['tokens_per_s']:11,.0f}{ratio:8.2f}{one['repeated']:10.3f}{one['accepted']:10.2f}{one['logprob']:10.4f}"
        )
        print(f"{row:14}{batch:>6}{figures}", flush=True)


def main() -> None:
    parser = row_parser(__doc__, 200.0, settings=True)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    arguments = parser.parse_args()
    require_device(arguments.device)
    if arguments.row:
        with tempfile.TemporaryDirectory() as scratch:
            options = parse_options(arguments.set)
            finish(measure(arguments.row, arguments.device, arguments.quick, arguments.batches, Path(scratch), options))
    print(versions(arguments.device))
    print(f"{'speculative':14}{'batch':>6}{'tokens/s':>11}{'ratio':>8}{'repeated':>10}{'accepted':>10}{'logprob':>10}")
    base: dict[str, Any] = {}
    for row in arguments.rows:
        result = run_row(__file__, row, arguments.limit)
        base = result.get("found", {}) if row == "none" else base
        report(row, result, base)


if __name__ == "__main__":
    main()
