"""The demo: make a small model, warm-start it by SFT on a sloppy teacher's sums, train it with GRPO, show what it learned.

python demo/run.py --seed 0
"""

import argparse
import json
import resource
import shutil
import sys
import time
from pathlib import Path

from teacher import write_solutions

from rlcore.cli.display import open_display
from rlcore.cli.errors import notes_of
from rlcore.cli.errors import report as report_error
from rlcore.run.plan.prepare import prepare
from rlcore.run.train import train
from rlcore.spi import RlcoreError
from rlcore.testing.models import make_model
from rlcore.transformers_import import import_transformers

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
ALPHABET = "0123456789+="


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs"))
    parser.add_argument("--trainer", default="auto", help="of both runs")
    parser.add_argument("overrides", nargs="*", help="key.path=value, for the GRPO run")
    arguments = parser.parse_args()

    start = time.perf_counter()
    root = arguments.directory / f"demo-seed{arguments.seed}"
    shutil.rmtree(root, ignore_errors=True)
    import_transformers()
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
    grpo = prepare(RECIPES / "demo-grpo.toml", [*common, f"model.path={model}", *arguments.overrides])
    assert grpo.environment is not None
    solutions = root / "solutions.jsonl"
    write_solutions(grpo.environment.rows("train") or (), solutions, arguments.seed)

    learn("demo-sft.toml", [*common, f"model.path={model}", f"data.train.path={solutions}"])
    summary = learn("demo-grpo.toml", [*common, f"model.path={root / 'sft' / 'model'}", *arguments.overrides])
    report(root, summary, time.perf_counter() - start)


def learn(recipe: str, overrides: list[str]) -> dict[str, object]:
    """What `rlcore train` does."""
    with open_display("auto", {}) as progress:
        return train(prepare(RECIPES / recipe, overrides), resume=False, progress=progress)


def report(root: Path, summary: dict[str, object], seconds: float) -> None:
    """The demo's figures, on the terminal and in its own summary.json."""
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {**summary, "demo_seconds": seconds, "peak_rss_mib": peak_mib}
    (root / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"demo: {seconds:.0f} s in all, peak memory {peak_mib:.0f} MiB, figures in {root / 'summary.json'}")


if __name__ == "__main__":
    try:
        main()
    except RlcoreError as error:
        report_error(f"{error}{notes_of(error)}")
        sys.exit(error.exit_code)
