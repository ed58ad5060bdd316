"""The field's headline work, GRPO on a model of 8 billion parameters: seconds of a step by phase, and shares of the GPUs' peak.

    python benchmarks/headline.py results --gpus 8              # three steps more, then the means of all so far
    python benchmarks/headline.py results --gpus 8 --report     # the means alone
    python benchmarks/headline.py experts --gpus 8 --trainer megatron --shape 30b-a3b
    python benchmarks/headline.py long --gpus 4 --prompts 1 --samples 4 --updates 1 --prompt-length 126976 --length 131072
    python benchmarks/headline.py /tmp/results --quick          # a tiny shape on a CPU, to try the script

A step of the shape of Llama-3.1-8B with random weights: 64 prompts of 150 tokens x 32 samples, four updates of 512, sequences
of at most 4,096 tokens, log-probabilities of the policy and of a reference policy with a KL term, bfloat16 with float32 master
weights, trainer `fsdp2` (or `--trainer megatron`) and generator `vllm` on the same GPUs. Lengths are log-normal with a mean of
795 and a tail to the limit; a sample's is drawn from its seed and forced through its token limit. Rewards are random but fixed.

Every step is kept in the directory as soon as it is done, so that a machine may be lent for a few minutes at a time; each call
starts anew, and its first step, which warms up, is left out. `--set KEY=VALUE` changes the recipe. With `--async 1` generation
runs a step ahead, and heavy and light steps alternate: a call's last step, in which no generation begins, is left out too, and
the means are of whole pairs. A call of ten steps has four.

Model FLOPs of a sequence of l tokens are 2 N l + 2 L D l^2 forward, with N the weights in matrix products, L layers and
D = heads x head dimension; training takes three times as many. Recomputed work does not count. The log-probabilities take one
pass over all sequences for the reference and one over those of the second and later updates, or the first alone with
`--previous-logprobs generation`. The peak is 989 TFLOP/s for each GPU, dense bfloat16 of an H100 or H200 SXM, also where
products are of 8 bits.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from attrs import asdict, evolve, fields_dict, frozen
from generator_setup import QUICK_ENVIRONMENT, last_lines, run_process, versions
from model_shapes import SHAPES, active_weights, attention_flops, require_device, write_model

PEAK_FLOPS = 989e12
COLUMNS = ("total", "train", "refit", "generation", "logprobs", "other")
PUBLISHED = (
    ("NeMo-RL 0.3, FSDP2, 8 H100", (122, 38, 4, 57, 19, None), 777),
    ("NeMo-RL 0.3, Megatron, 8 H100", (112, 28, 5, 58, 18, None), 795),
)
"""NVIDIA, July 2025: Llama-3.1-8B-Instruct, GRPO, 2,048 samples, global batch 512, 4,096 tokens; means of steps 22 to 29."""
ENTRY_POINTS = """
[rlcore.environments]
headline = headline_plugins:ENVIRONMENT
[rlcore.generators]
headline_{generator} = headline_plugins:{attribute}
"""


@frozen(kw_only=True)
class Work:
    """Of a step."""

    shape: str = "8b"
    num_prompts: int = 64
    group: int = 32
    num_updates: int = 4
    prompt_length: int = 150
    max_length: int = 4096
    max_tokens_per_microbatch: int = 8192
    trainer: str = "fsdp2"
    generator: str = "vllm"
    device: str = "cuda"
    dtype: str = "bfloat16"
    gpus: int = 8
    """0 runs in one process, without `[cluster]`."""
    max_staleness: int = 0
    """Steps that generation runs ahead at most."""
    previous_logprobs: str = "trainer"
    """Whose the policy's are that the ratio is taken against: the trainer's, which computes them, or the generator's."""

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.group


QUICK = Work(
    shape="tiny",
    num_prompts=8,
    group=4,
    prompt_length=6,
    max_length=128,
    max_tokens_per_microbatch=512,
    generator="transformers",
    device="cpu",
    dtype="float32",
    gpus=0,
)


def recipe_of(work: Work) -> dict[str, Any]:
    """The keys of the recipe."""
    keys = {
        "algorithm.name": "grpo",
        "algorithm.grpo.kl_coefficient": 0.01,
        "algorithm.grpo.previous_logprobs": work.previous_logprobs,
        "environment.name": "headline",
        "environment.headline.num_prompts": 64 * work.num_prompts,
        "environment.headline.prompt_length": work.prompt_length,
        "trainer.name": work.trainer,
        "generator.name": f"headline_{work.generator}",
        "rollout.samples_per_prompt": work.group,
        "rollout.max_prompt_tokens": work.prompt_length,
        "rollout.max_response_tokens": work.max_length - work.prompt_length,
        "rollout.stop_token_ids": [],
        "training.prompts_per_step": work.num_prompts,
        "training.minibatches_per_step": work.num_updates,
        "training.max_tokens_per_microbatch": work.max_tokens_per_microbatch,
        "run.device": work.device,
        "async.max_staleness": work.max_staleness,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "checkpoint.at_end": False,
        "logging.rollouts_every_n_steps": 0,
        "sinks.names": [],
    }
    if work.generator == "vllm" and work.device == "cuda":
        keys["generator.headline_vllm.gpu_memory_utilization"] = 0.6
    if work.gpus:
        keys |= {"cluster.gpus_per_node": work.gpus, "cluster.placement": "colocated", "cluster.max_restarts": 0}
    return keys


def run(work: Work, directory: Path, model: Path, num_steps: int, overrides: list[str], seconds: float) -> str | None:
    """Run so many steps, each of which lasts in the directory; what went wrong, if anything did."""
    information = directory / "plugins" / "rlcore_headline-1.0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: rlcore-headline\nVersion: 1.0\n")
    points = ENTRY_POINTS.format(generator=work.generator, attribute=work.generator.upper())
    (information / "entry_points.txt").write_text(points)
    number = len(list(directory.glob("runs/*")))
    own = {"model.path": str(model), "run.directory": str(directory / "runs"), "run.name": f"call-{number:03}"}
    keys = recipe_of(work) | own | {"run.seed": number, "run.num_steps": num_steps}
    recipe = directory / "recipe.toml"
    recipe.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    command = [
        sys.executable,
        "-m",
        "phase_memory",
        str(directory / f"memory-{number:03}.json"),
        "train",
        str(recipe),
        *overrides,
    ]
    path = (directory / "plugins", Path(__file__).resolve().parent, *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in path if str(folder))}
    if work.device == "cpu":
        environment |= QUICK_ENVIRONMENT
    log = directory / f"call-{number:03}.log"
    status, output = run_process(command, log, environment, seconds)
    with log.open("a") as file:
        file.write(output)
    if status == 0:
        return None
    return f"{f'over {seconds:.0f} s' if status is None else f'exit code {status}'}; the end of {log}:\n{last_lines(log)}"


def done_steps(directory: Path, max_staleness: int) -> list[dict[str, float]]:
    """The metrics of the whole cycles of each call in the directory: `max_staleness` + 1 steps each, none of them the call's
    first, nor those at its end in which no generation begins."""
    steps = []
    for file in sorted(directory.glob("runs/*/metrics.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        done = [record for record in records if "time/total_s" in record][1:]
        num_full = max(0, len(done) - max_staleness)
        steps += done[: num_full - num_full % (max_staleness + 1)]
    return steps


def memory_by_phase(directory: Path) -> dict[str, list[float]]:
    """The largest GiB in use on each device, of all calls."""
    most: dict[str, list[float]] = {}
    for file in sorted(directory.glob("memory-*.json")):
        for phase, used in json.loads(file.read_text()).items():
            most[phase] = [max(pair) for pair in zip(used, most.get(phase, used), strict=True)]
    return most


def figures(work: Work, steps: list[dict[str, float]]) -> dict[str, float]:
    """Means over the steps: seconds by column, tokens, and utilisation."""
    own = {name: fmean(step[f"time/{name}_s"] for step in steps) for name in COLUMNS if name != "other"}
    own["other"] = own["total"] - sum(value for name, value in own.items() if name != "total")
    for name in ("trainer_idle", "generator_idle"):
        own[name] = fmean(step[f"time/{name}_s"] / step["time/total_s"] for step in steps)
    own["mean_tokens"] = fmean(step["response_length_mean"] for step in steps)
    tokens = work.num_samples * (work.prompt_length + own["mean_tokens"])
    squared = work.num_samples * fmean(step["environment/squared_length"] for step in steps)
    forward = forward_flops(work.shape, tokens, squared)
    devices = max(work.gpus, 1)
    own["tokens_per_s"] = tokens / own["total"] / devices
    own["train_share"] = 3 * forward / own["train"] / devices / PEAK_FLOPS
    passes = 1 + (work.num_updates - 1) / work.num_updates * (work.previous_logprobs == "trainer")
    if own["logprobs"]:  # none without a reference where the generator's serve as the policy's
        own["logprobs_share"] = passes * forward / own["logprobs"] / devices / PEAK_FLOPS
    return own


def forward_flops(shape: str, tokens: float, squared: float) -> float:
    """As the module's docstring says, of sequences with so many tokens, and with this sum of squared lengths."""
    return 2 * active_weights(shape) * tokens + attention_flops(shape, squared)


def report(work: Work, directory: Path, *, is_shared: bool) -> None:
    """Print what is in the directory; `is_shared`: trainer and generator have the same devices."""
    steps = done_steps(directory, work.max_staleness)
    size = f"{work.shape}, {work.num_samples} samples a step, {work.num_updates} updates, {work.trainer}, {work.gpus} GPUs"
    print(f"\n{versions(work.device)}; {size}")
    heads = ("total", "train", "refit", "generation", "log-probs", "other", "generated", "tok/s/GPU", "train MFU", "log-p MFU")
    print(f"{'seconds':34}" + "".join(f"{head:>11}" for head in heads))
    if steps:
        own = figures(work, steps)
        shown = "".join(f"{own[name]:>11.2f}" for name in COLUMNS)
        shown += f"{own['mean_tokens']:>11.1f}{own['tokens_per_s']:>11,.0f}"
        on_gpu = work.device == "cuda"
        shares = (own.get(name) for name in ("train_share", "logprobs_share"))
        shown += "".join(f"{share:>11.1%}" if on_gpu and share is not None else f"{'-':>11}" for share in shares)
        print(f"{f'rlcore, means of {len(steps)} steps':34}{shown}")
        idle = {f"{name} devices": own[f"{name}_idle"] for name in ("trainer", "generator")}
        if is_shared:  # what is not the idle time of both is the work of one
            idle = {"shared devices": max(0.0, sum(idle.values()) - 1.0)}
        for name, share in idle.items():
            print(f"{f'idle share of a step, {name}:':42}{share:>11.1%}")
    else:
        print("no step is done yet but those that warm up")
    for phase, used in memory_by_phase(directory).items():
        print(f"most GiB in use, {phase + ':':17}" + "".join(f"{gib:>11.1f}" for gib in used))
    if work.shape == "8b":
        for name, seconds, mean_tokens in PUBLISHED:
            shown = "".join(f"{'-' if value is None else value:>11}" for value in seconds)
            print(f"{f'{name}*':34}{shown}{mean_tokens:>11}" + f"{'-':>11}" * 3)
        print("* published by NVIDIA in July 2025, not measured here; log-probabilities, refit and others as reported there")


def same_work(work: Work, overrides: list[str], directory: Path) -> None:
    """Steps of different work must not end up in one mean."""
    kept, now = directory / "work.json", json.dumps({**asdict(work), "set": overrides}, indent=1)
    if kept.exists() and kept.read_text() != now:
        sys.exit(
            f"{directory} holds steps of other work: {kept} is\n{kept.read_text()}\nbut now\n{now}\nName another directory."
        )
    directory.mkdir(parents=True, exist_ok=True)
    kept.write_text(now)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the steps are kept")
    parser.add_argument("--steps", type=int, default=4, help="of this call, the one that warms up included")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--gpus", type=int, help="0 runs in one process")
    parser.add_argument("--prompts", type=int, dest="num_prompts", help="of a step: 32 on 4 GPUs are the same work for each")
    parser.add_argument("--samples", type=int, dest="group", help="of a prompt")
    parser.add_argument("--updates", type=int, dest="num_updates", help="of a step")
    parser.add_argument("--prompt-length", type=int, help="tokens")
    parser.add_argument("--length", type=int, dest="max_length", help="most tokens of prompt and answer")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--trainer", choices=("fsdp2", "megatron"))
    parser.add_argument("--generator", choices=("vllm", "transformers"))
    parser.add_argument("--async", type=int, default=0, dest="max_staleness", help="steps that generation runs ahead at most")
    parser.add_argument("--previous-logprobs", choices=("trainer", "generation"), help="of which side, of the policy")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the recipe")
    parser.add_argument("--quick", action="store_true", help="a tiny shape on a CPU, to try the script")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds that the call takes at most; done steps are kept")
    parser.add_argument("--model-directory", type=Path, help="where the model is made, or found")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--write-model", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen_work(arguments: argparse.Namespace) -> Work:
    given = {name: value for name, value in vars(arguments).items() if name in fields_dict(Work) and value is not None}
    work = evolve(QUICK if arguments.quick else Work(), **given)
    return evolve(work, dtype="float32" if work.device == "cpu" else "bfloat16")


def main() -> None:
    begin = time.monotonic()
    arguments = parse()
    work = chosen_work(arguments)
    model = arguments.model_directory or Path(tempfile.gettempdir()) / f"rlcore-headline-{work.shape}-{work.dtype}"
    if arguments.write_model:
        write_model(model, work.shape, work.device, work.dtype)
        return
    directory = arguments.directory.resolve()
    if not arguments.report:
        require_device(work.device)
    same_work(work, arguments.set, directory)
    failure = None
    if not arguments.report:
        if not (model / "config.json").exists():  # in a process of its own, which leaves no memory of the device taken
            subprocess.run([sys.executable, *sys.argv, "--write-model"], check=True)
        failure = run(work, directory, model, arguments.steps, arguments.set, arguments.limit - (time.monotonic() - begin))
    report(work, directory, is_shared="cluster.placement=separate" not in arguments.set)
    if failure is not None:
        sys.exit(failure)


if __name__ == "__main__":
    main()
