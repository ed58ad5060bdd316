"""GRPO on a pretrained model, by rlcore with two trainers and by TRL: held-out scores over steps and time, three seeds each.

    python recipes/smollm2/make_model.py runs/smollm2/model && python recipes/smollm2/make_rows.py runs/smollm2
    python benchmarks/real_model.py runs/real-model                       # needs a GPU, vLLM and, for `trl`, TRL
    python benchmarks/real_model.py runs/real-model --sides trl           # one side; what was run before stays
    python benchmarks/real_model.py runs/real-model --sides --figure docs/real-model.svg        # the table and figure alone
    python benchmarks/real_model.py /tmp/results --quick --device cpu     # a tiny random model, to try the script

All sides have the same prompts in the same order for a seed, the same reward (the last number is right), and the same Settings:
one AdamW update a step on all samples, float32 master weights and bfloat16 arithmetic, no KL term, token-level loss, the
sampler's probabilities corrected by the trainer's, truncated at 2. Each generates by a vLLM of its own, and is measured by
greedy answers to the same held-out prompts.

The seeds of a side run at the same time on one GPU (`--together`), those of another side after them, so that all have an equal
part of it. Starts come one after another, since an engine that starts takes what others allocate for its own, and no run takes
its first step before all have started. Seconds are those of steps alone, without starts and evaluations.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

from attrs import asdict, evolve
from generator_setup import ENVIRONMENT, QUICK_ENVIRONMENT, last_lines
from model_shapes import require_device
from real_model_curves import draw, read_records
from real_model_sides import Record, Settings, Turns, read_rows, run_rlcore, run_trl

SIDES = ("fsdp2", "megatron", "trl")
QUICK = Settings(num_steps=2, num_prompts=2, group=2, max_tokens=4, evaluate_every=1, num_held_out=2, generator="transformers")


def sums() -> list[dict[str, Any]]:
    """Rows to try the script with."""
    pairs = [(first, second) for first in range(10) for second in range(10)]
    return [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in pairs]


def write_rows(directory: Path, rows: Path | None, seeds: Sequence[int], settings: Settings) -> None:
    """The held-out rows, and for each seed those of its steps in their order."""
    names = ("train.jsonl", "held-out.jsonl")
    train, held_out = (sums() if rows is None else read_rows(rows / name) for name in names)

    def write(name: str, chosen: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) + "\n" for row in chosen]
        (directory / name).write_text("".join(lines))

    write("held-out.jsonl", held_out[: settings.num_held_out])
    for seed in seeds:
        source, number, order = random.Random(seed), settings.num_steps * settings.num_prompts, list[Any]()
        while len(order) < number:  # whole passes, each in an order of its own
            order += source.sample(train, len(train))
        write(f"train-{seed}.jsonl", order[:number])


def start(directory: Path, side: str, seeds: Sequence[int], model: Path, settings: Settings, limit: float) -> None:
    """The runs of a side that are to go on together, each in a process of its own."""
    for seed in seeds:
        (directory / f"ready-{side}-{seed}").unlink(missing_ok=True)

    def run(seed: int) -> None:
        log = directory / f"{side}-{seed}.log"
        own = json.dumps({"side": side, "seed": seed, "seeds": seeds, "settings": asdict(settings)})
        command = [sys.executable, __file__, str(directory), "--model", str(model), "--run", own]
        quick = QUICK_ENVIRONMENT if settings.device == "cpu" else {}
        with log.open("w") as file:
            try:
                environment = {**os.environ, **ENVIRONMENT, **quick}
                done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=limit)
                state = f"exit code {done.returncode}" if done.returncode else None
            except subprocess.TimeoutExpired:
                state = f"over {limit:.0f} s"
        if state is not None:
            print(f"{side}, seed {seed}: {state}; the end of {log}:\n{last_lines(log)}", flush=True)

    if len(seeds) == 1:
        run(seeds[0])
        return
    with ThreadPoolExecutor(len(seeds)) as pool:
        list(pool.map(run, seeds))


def run_one(directory: Path, model: str, side: str, seed: int, seeds: Sequence[int], settings: Settings) -> None:
    """In its own process."""
    turns = Turns(directory, side, seeds, seed)
    try:
        turns.begin()
        record = Record(directory / f"{side}-{seed}.json", side, seed, settings)
        if side == "trl":
            run_trl(seed, settings, directory, model, record, turns)
        else:
            run_rlcore(side, seed, settings, directory, model, record, turns)
    finally:
        turns.end()
        sys.stdout.flush()


def report(directory: Path) -> None:
    """A line a side; what single runs came to behind it."""
    records = read_records(directory)
    print(f"\n{'':12}{'runs':>5}{'at the start':>14}{'at the end':>12}{'each':>26}{'step s':>9}{'steps s':>9}{'start s':>9}")
    for side, runs in records.items():
        first, last = ([run["held_out"][place]["score"] for run in runs] for place in (0, -1))
        each = " ".join(f"{score:.3f}" for score in last)
        steps = [median(run["step_s"][1:] or run["step_s"] or [0.0]) for run in runs]
        whole, starts = (mean(values) for values in ([sum(run["step_s"]) for run in runs], [run["start_up_s"] for run in runs]))
        print(
            f"{side:12}{len(runs):>5}{mean(first):>14.3f}{mean(last):>12.3f}{each:>26}{mean(steps):>9.2f}{whole:>9.1f}{starts:>9.1f}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where figures are kept, a file a run")
    parser.add_argument("--model", type=Path, help="by default runs/smollm2/model; with --quick, one that is made")
    parser.add_argument(
        "--rows",
        type=Path,
        help="the folder of train.jsonl and held-out.jsonl, by default runs/smollm2; with --quick, some sums",
    )
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--together", type=int, default=3, help="runs of a side at the same time")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--generator", choices=("vllm", "transformers"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny random model and two steps, to try the script")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for runs that go on together, starts included")
    parser.add_argument("--figure", type=Path, help="draw the curves into this .svg or .png file")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    directory = arguments.directory.resolve()
    if arguments.run:
        own = json.loads(arguments.run)
        run_one(directory, str(arguments.model), own["side"], own["seed"], own["seeds"], Settings(**own["settings"]))
        if own["settings"]["generator"] == "vllm":
            os._exit(0)  # engines that are shut down by their destructors can hang
        return
    names = {"num_steps": arguments.steps, "learning_rate": arguments.learning_rate, "generator": arguments.generator}
    given: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    settings = evolve(QUICK if arguments.quick else Settings(), device=arguments.device, **given)
    sides = list(arguments.sides)
    if "trl" in sides and find_spec("trl") is None:
        print("TRL is not installed here, so it is left out")
        sides.remove("trl")
    if sides:
        require_device(settings.device)
        directory.mkdir(parents=True, exist_ok=True)
        model, rows = arguments.model, arguments.rows
        if arguments.quick:
            from rlcore_torchkit.testing.models import make_model

            model = model or make_model(directory / "model", head_dim=64)
        else:
            model, rows = model or Path("runs/smollm2/model"), rows or Path("runs/smollm2")
        write_rows(directory, rows, arguments.seeds, settings)
    for side in sides:
        for place in range(0, len(arguments.seeds), arguments.together):
            seeds = arguments.seeds[place : place + arguments.together]
            start(directory, side, seeds, model, settings, arguments.limit)
    report(directory)
    if arguments.figure:
        draw(read_records(directory), arguments.figure)


if __name__ == "__main__":
    main()
