"""The demo: make a small model, warm-start it by SFT, train it with GRPO, and show what it learned.

    python demo/run.py --seed 0
"""

import argparse
import json
import resource
import shutil
import time
from pathlib import Path

from rlcore.cli.display import make_progress
from rlcore.run.setup import prepare
from rlcore.run.train import train
from rlcore.testing.models import make_model

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
ALPHABET = "0123456789+-*=?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs"))
    parser.add_argument("overrides", nargs="*", help="key.path=value, for the GRPO run")
    arguments = parser.parse_args()

    start = time.perf_counter()
    root = arguments.directory / f"demo-seed{arguments.seed}"
    shutil.rmtree(root, ignore_errors=True)
    model = make_model(
        root / "model",
        "qwen3",
        seed=arguments.seed,
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        alphabet=ALPHABET,
        max_length=64,
        initializer_range=0.02,
    )
    common = [f"run.seed={arguments.seed}", f'run.directory="{root}"']
    warm_start = [*common, f'model.path="{model}"']
    train(prepare(RECIPES / "demo-sft.toml", warm_start), resume=False, progress=make_progress())
    grpo = [*common, f'model.path="{root / "sft" / "model"}"', *arguments.overrides]
    summary = train(prepare(RECIPES / "demo-grpo.toml", grpo), resume=False, progress=make_progress())
    seconds = time.perf_counter() - start
    report(root, summary, seconds)


def report(root: Path, summary: dict[str, object], seconds: float) -> None:
    """The demo's figures, on the terminal and in its own summary.json."""
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {**summary, "demo_seconds": seconds, "peak_rss_mib": peak_mib}
    (root / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"held-out accuracy {summary['accuracy_before']:.3f} → {summary['accuracy_after']:.3f}")
    print(f"{seconds:.0f} s in all, peak memory {peak_mib:.0f} MiB, run directory {summary['run_directory']}")


if __name__ == "__main__":
    main()
