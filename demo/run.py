"""The demo: make a small model, warm-start it by SFT on a sloppy teacher's sums, train it with GRPO, show what it learned.

python demo/run.py --seed 0
"""

import argparse
import json
import resource
import shutil
import time
from pathlib import Path

from ending import run_to_end
from teacher import write_solutions

import rlcore
from rlcore_torchkit.testing.models import make_model

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
ALPHABET = "0123456789+="


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs"))
    parser.add_argument("--trainer", default="auto", help="of both runs")
    parser.add_argument("--warm-start", action="append", default=[], metavar="KEY=VALUE", help="overrides for the SFT run")
    parser.add_argument("overrides", nargs="*", help="key.path=value, for the GRPO run")
    arguments = parser.parse_args()

    start = time.perf_counter()
    root = arguments.directory / f"demo-seed{arguments.seed}"
    shutil.rmtree(root, ignore_errors=True)
    model = make_model(
        root / "model",
        "qwen3",
        seed=arguments.seed,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        alphabet=ALPHABET,
        max_length=64,
    )
    common = [f"run.seed={arguments.seed}", f"run.directory={root}", f"trainer.name={arguments.trainer}"]
    problems = rlcore.rows(RECIPES / "demo-grpo.toml", *common, f"model.path={model}", *arguments.overrides)
    solutions = root / "solutions.jsonl"
    write_solutions(problems, solutions, arguments.seed)

    sft = rlcore.train(
        RECIPES / "demo-sft.toml", *common, f"model.path={model}", f"data.train.path={solutions}", *arguments.warm_start
    )
    grpo = rlcore.train(RECIPES / "demo-grpo.toml", *common, f"model.path={sft.model}", *arguments.overrides)
    report(root, grpo.summary, time.perf_counter() - start)


def report(root: Path, summary: dict[str, object], seconds: float) -> None:
    """The demo's figures, on the terminal and in its own summary.json."""
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {**summary, "demo_seconds": seconds, "peak_rss_mib": peak_mib}
    (root / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"demo: {seconds:.0f} s in all, peak memory {peak_mib:.0f} MiB, figures in {root / 'summary.json'}")


if __name__ == "__main__":
    run_to_end(main)
