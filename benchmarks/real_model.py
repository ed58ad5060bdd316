"""SmolLM2 trained by rlcore and by TRL: held-out scores over steps and time, by trainer, algorithm and kind of run.

    python recipes/smollm2/make_model.py runs/smollm2/model
    python recipes/smollm2/make_rows.py runs/smollm2 --families chain_sum gcd letter_counting word_problems
    python benchmarks/real_model.py runs/real-model                       # needs a GPU, vLLM and, for `trl`, TRL
    python benchmarks/real_model.py runs/real-model --sides trl           # one side; what was run before stays
    python benchmarks/real_model.py runs/real-model --sides --figure docs/real-model.svg        # the table and figure alone
    python benchmarks/real_model.py /tmp/results --quick --device cpu     # a tiny random model, to try the script

All sides have the same prompts in the same order for a seed, and the same reward: the last number is right. `fsdp2`, `megatron`
and `trl` share all Settings: one AdamW update a step on all samples, float32 master weights, bfloat16 arithmetic, no KL term,
token-level loss, importance weights between generator and trainer truncated at 2. Other sides change the keys in SIDES. Each
generates by a vLLM of its own, and is measured by greedy answers to the same held-out prompts.

`--together` runs share the GPU: the next one starts as soon as one has ended, and the first alone, since it compiles what the
others find in caches. The score is the mean over the sets of held-out rows: reasoning-gym's and, where there are any, word
problems. Seconds of a step are those of a run beside the others.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from attrs import asdict, evolve
from generator_setup import ENVIRONMENT, QUICK_ENVIRONMENT, last_lines
from model_shapes import require_device
from real_model_curves import draw, draw_variants, read_records
from real_model_sides import SIDES, Record, Settings, fix_cache, read_rows, run_name, run_rlcore, run_trl

WORD_PROBLEMS = "word_problems"
MAIN = ("fsdp2", "megatron", "trl")
QUICK = Settings(num_steps=2, num_prompts=2, group=2, max_tokens=4, evaluate_every=1, num_held_out=2, generator="transformers")


def sums() -> list[dict[str, Any]]:
    """Rows to try the script with."""
    pairs = [(first, second) for first in range(10) for second in range(10)]
    return [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in pairs]


def write_rows(directory: Path, rows: Path | None, seeds: Sequence[int], settings: Settings) -> None:
    """The held-out rows of each set, and for each seed those of its steps in their order."""
    names = ("train.jsonl", "held-out.jsonl")
    train, held_out = (sums() if rows is None else read_rows(rows / name) for name in names)

    def write(name: str, chosen: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) + "\n" for row in chosen]
        (directory / name).write_text("".join(lines))

    for old in directory.glob("held-out-*.jsonl"):
        old.unlink()
    for name in dict.fromkeys(set_of(row) for row in held_out):
        of_set = [row for row in held_out if set_of(row) == name]
        write(f"held-out-{name}.jsonl", of_set[: max(1, settings.num_held_out * len(of_set) // len(held_out))])
    for seed in seeds:
        source, number, order = random.Random(seed), settings.num_steps * settings.num_prompts, list[Any]()
        while len(order) < number:  # whole passes, each in an order of its own
            order += source.sample(train, len(train))
        write(f"train-{seed}.jsonl", order[:number])


def set_of(row: Mapping[str, Any]) -> str:
    """`word_problems` or `reasoning_gym`."""
    family = row.get("entry", {"metadata": {"source_dataset": "sums"}})["metadata"]["source_dataset"]
    return WORD_PROBLEMS if family == WORD_PROBLEMS else "reasoning_gym"


def start(
    directory: Path, runs: Sequence[tuple[str, int]], model: Path, settings: Settings, together: int, limit: float
) -> None:
    """Runs, each a side and a seed, in processes of their own, so many at once and for so many seconds in all."""
    end = time.monotonic() + limit

    def run(side: str, seed: int) -> None:
        name = run_name(side, seed)
        log = directory / f"{name}.log"
        own = json.dumps({"side": side, "seed": seed, "settings": asdict(settings)})
        command = [sys.executable, __file__, str(directory), "--model", str(model), "--run", own]
        quick = QUICK_ENVIRONMENT if settings.device == "cpu" else {}
        with log.open("w") as file:
            try:
                environment = {**os.environ, **ENVIRONMENT, **quick}
                left = max(0.0, end - time.monotonic())
                done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=left)
                state = f"exit code {done.returncode}" if done.returncode else None
            except subprocess.TimeoutExpired:
                state = "cut off by --limit"
        if state is not None:
            print(f"{name}: {state}; the end of {log}:\n{last_lines(log)}", flush=True)

    for each in runs:
        (directory / f"{run_name(*each)}.json").unlink(missing_ok=True)
    with ThreadPoolExecutor(together) as pool:
        first, *others = runs
        begun = pool.submit(run, *first)
        while not begun.done() and not (directory / f"{run_name(*first)}.json").exists():
            time.sleep(0.2)
        list(pool.map(run, *zip(*others, strict=True)) if others else ())


def run_one(directory: Path, model: str, side: str, seed: int, settings: Settings) -> None:
    """In its own process."""
    record = Record(directory / f"{run_name(side, seed)}.json", side, seed, settings)
    if settings.generator == "vllm" and settings.device == "cuda":
        fix_cache(settings.cache_bytes)
    if side == "trl":
        run_trl(seed, settings, directory, model, record)
    else:
        run_rlcore(side, seed, settings, directory, model, record)
    sys.stdout.flush()


def report(directory: Path) -> None:
    """A line a side: means over its runs, the standard deviation of the last scores, and each of these."""
    records = read_records(directory)
    sets = sorted({name for runs in records.values() for run in runs for name in run["held_out"][0]["sets"]})
    heads = ("runs", "steps", "start", "end", "±", *sets, "step s", "steps s", "start s")
    print(f"\n{'':12}" + "".join(f"{head:>{max(9, len(head) + 2)}}" for head in heads) + "  each")
    for side, runs in records.items():
        first, last = ([run["held_out"][place]["score"] for run in runs] for place in (0, -1))
        steps = [median(run["step_s"][1:] or run["step_s"] or [0.0]) for run in runs]
        parts = [mean(run["held_out"][-1]["sets"].get(name, 0.0) for run in runs) for name in sets]
        ends = [min(run["held_out"][-1]["step"] for run in runs), mean(first), mean(last), stdev(last) if last[1:] else 0.0]
        times = [mean(steps), mean(sum(run["step_s"]) for run in runs), mean(run["start_up_s"] for run in runs)]
        shown = [str(len(runs)), str(ends[0]), *(f"{value:.3f}" for value in [*ends[1:], *parts])]
        shown += [f"{times[0]:.2f}", f"{times[1]:.1f}", f"{times[2]:.1f}"]
        line = "".join(f"{text:>{max(9, len(head) + 2)}}" for head, text in zip(heads, shown, strict=True))
        print(f"{side:12}{line}  " + " ".join(f"{score:.3f}" for score in last))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where figures are kept, a file a run")
    parser.add_argument("--model", type=Path, help="by default runs/smollm2/model; with --quick, one that is made")
    parser.add_argument(
        "--rows",
        type=Path,
        help="the folder of train.jsonl and held-out.jsonl, by default runs/smollm2; with --quick, some sums",
    )
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=MAIN)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--together", type=int, default=5, help="runs at the same time")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--prompts", type=int, help="of a step")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--generator", choices=("vllm", "transformers"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny random model and two steps, to try the script")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of all runs, starts included")
    parser.add_argument("--figure", type=Path, help="draw the curves of both trainers and of TRL into this .svg or .png file")
    parser.add_argument("--variants", type=Path, help="draw those of the other sides, beside fsdp2's, into this one")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    directory = arguments.directory.resolve()
    if arguments.run:
        own = json.loads(arguments.run)
        run_one(directory, str(arguments.model), own["side"], own["seed"], Settings(**own["settings"]))
        if own["settings"]["generator"] == "vllm":
            os._exit(0)  # engines that are shut down by their destructors can hang
        return
    names = {
        "num_steps": arguments.steps,
        "num_prompts": arguments.prompts,
        "learning_rate": arguments.learning_rate,
        "generator": arguments.generator,
    }
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
        runs = [(side, seed) for seed in arguments.seeds for side in sides]
        start(directory, runs, model, settings, arguments.together, arguments.limit)
    report(directory)
    if arguments.figure:
        draw(read_records(directory), arguments.figure)
    if arguments.variants:
        draw_variants(read_records(directory), arguments.variants)


if __name__ == "__main__":
    main()
