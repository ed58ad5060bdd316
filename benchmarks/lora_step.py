"""GRPO steps of a model of adapters on one GPU, `fsdp2` or `megatron` beside `vllm`: seconds, refits, and memory by phase.

    python benchmarks/lora_step.py                                  # an 8B shape on one GPU of 80 GB, about 20 minutes
    python benchmarks/lora_step.py --rows fsdp2-apart megatron-apart
    python benchmarks/lora_step.py --quick --device cpu             # a tiny shape, to try the script

Work of a step: 16 prompts of 128 tokens x 8 samples of exactly 512 tokens, from a Llama-3.1-8B shape with random
weights in bfloat16; adapters of rank 32 on every linear layer, one AdamW update. Rewards are random but fixed. Trainer
and generator stay on the GPU, with the weights of each: nothing sleeps, so a refit is all that passes between them. A
row is TRAINER-HOW: with `apart` a refit brings adapters alone, to vLLM's own LoRA layers; with `merged` the whole
model, from which vLLM generates as from any other. The target is a refit of adapters within 0.1 s.

Each row is a run of its own in a process of its own. Figures are medians of the steps after the first; the first refit
brings the whole model in either case and is in a column of its own. Memory is the most that the GPU had in use in each
phase, whoever used it; without a GPU, what the process holds of the machine's memory. Agreement is the largest
token_mult_prob_error of a step.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from generator_setup import QUICK_ENVIRONMENT, last_lines, run_process, versions
from model_shapes import require_device, write_model

ROWS = ("fsdp2-apart", "fsdp2-merged", "megatron-apart", "megatron-merged")
PHASES = ("generation", "train", "refit", "other")
MEMORY_PHASES = ("generation", "train", "refit")
RECIPE = """
[model]
path = ""
[lora]
rank = 32
alpha = 64.0
[algorithm]
name = "grpo"
[environment]
name = "letters"
[generator]
name = "vllm"
[generator.vllm]
max_num_seqs = 128
[residency]
generator_sleeps = false
[rollout]
samples_per_prompt = 8
stop_token_ids = []
[evaluation]
at_start = false
at_end = false
[logging]
rollouts_every_n_steps = 0
[sinks]
names = []
[checkpoint]
at_end = false
"""
FULL = {"shape": "8b", "num_prompts": 16, "prompt_length": 128, "num_tokens": 512, "microbatch": 8192}
QUICK = {"shape": "tiny", "num_prompts": 2, "prompt_length": 8, "num_tokens": 8, "microbatch": 128}
RECOMPUTED = {
    "fsdp2": ("trainer.fsdp2.activation_checkpointing=true",),
    "megatron": ('trainer.megatron.recompute="full"',),
}
"""So that activations of an 8B model fit beside two copies of its weights."""


def run(row: str, work: dict[str, Any], model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The steps' figures, and GiB by phase."""
    from letters_environment import PROVIDER
    from phase_memory import PhaseMemory

    from rlcore.registry.discovery import Registry, discover
    from rlcore.run.plan.prepare import prepare
    from rlcore.run.report.progress import Progress
    from rlcore.run.train import train

    trainer, _, adapters = row.partition("-")
    own = Registry.from_providers({"environment": [PROVIDER]})
    registry = Registry(entries=(*discover().entries, *own.entries))
    with tempfile.TemporaryDirectory() as directory:
        recipe, memory = Path(directory) / "recipe.toml", Path(directory) / "memory.json"
        recipe.write_text(RECIPE)
        settings = {
            "model.path": model,
            "run.directory": directory,
            "run.name": "run",
            "run.device": arguments.device,
            "run.num_steps": arguments.steps,
            "trainer.name": trainer,
            "refit.adapters": adapters,
            "environment.letters.num_prompts": work["num_prompts"] * arguments.steps,
            "environment.letters.prompt_length": work["prompt_length"],
            "training.prompts_per_step": work["num_prompts"],
            "training.max_tokens_per_microbatch": work["microbatch"],
            "rollout.max_prompt_tokens": work["prompt_length"],
            "rollout.max_response_tokens": work["num_tokens"],
        }
        given = [*(f"{key}={value}" for key, value in settings.items()), *RECOMPUTED[trainer], *arguments.set]
        PhaseMemory(memory, arguments.device).start()
        train(prepare(recipe, given, registry=registry), resume=False, progress=Progress())
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
        return {"steps": [json.loads(line) for line in lines], "memory": json.loads(memory.read_text())}


def print_row(row: str, found: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"{row:18}{found['failed']}", flush=True)
        return
    steps = found["steps"]
    seconds = [median(step.get(f"time/{name}_s", 0.0) for step in steps[1:]) for name in ("total", *PHASES)]
    columns = "".join(f"{value:12.3f}" for value in seconds)
    gib = "".join(f"{max(found['memory'].get(phase, [0.0])):18.1f}" for phase in MEMORY_PHASES)
    agreement = max(step["token_mult_prob_error"] for step in steps)
    print(f"{row:18}{columns}{steps[0].get('time/refit_s', 0.0):14.3f}{gib}{agreement:14.5f}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the recipe")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--limit", type=float, default=590.0, help="seconds for one row")
    parser.add_argument("--model-directory", type=Path, help="where the model is made, or found; a temporary one otherwise")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    require_device(arguments.device)
    work = QUICK if arguments.quick else FULL
    if arguments.row:
        print(json.dumps(run(arguments.row, work, arguments.model, arguments)))
        return
    dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model_directory or Path(scratch) / "model"
        if not (model / "config.json").exists():
            write_model(model, work["shape"], arguments.device, dtype)
        print(f"{versions(arguments.device)}; {work}, {arguments.steps} steps; medians of those after the first")
        heads = "".join(f"{f'{name} s':>12}" for name in ("step", *PHASES))
        heads += f"{'first refit s':>14}" + "".join(f"{f'{phase} GiB':>18}" for phase in MEMORY_PHASES)
        print(f"{'':18}{heads}{'agreement':>14}")
        for row in arguments.rows:
            options = ["--device", arguments.device, "--steps", str(arguments.steps)] + (["--quick"] if arguments.quick else [])
            options += [part for override in arguments.set for part in ("--set", override)]
            command = [sys.executable, __file__, "--row", row, "--model", str(model), *options]
            log = Path(scratch) / f"{row}.log"
            environment = QUICK_ENVIRONMENT if arguments.quick else {}
            status, output = run_process(command, log, environment, arguments.limit)
            lines = [line for line in output.splitlines() if line.startswith("{")]
            ending = f"over {arguments.limit:.0f} s" if status is None else f"exit code {status}"
            failed = {"failed": f"{ending}; the end of its log:\n{last_lines(log)}"}
            print_row(row, json.loads(lines[-1]) if lines and status == 0 else failed)


if __name__ == "__main__":
    main()
