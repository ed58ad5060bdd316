"""The time and the memory of a replay: a GRPO step of a bundle, computed again on two CPU cores.

    .venv/bin/python benchmarks/replay.py                  # a step of the 1.5B shape: 30 GiB of memory, and some minutes
    .venv/bin/python benchmarks/replay.py --dtype bfloat16 # half of the weights' memory
    .venv/bin/python benchmarks/replay.py --quick          # a tiny shape, to try the script
    .venv/bin/python benchmarks/replay.py KEY=VALUE …      # further keys of the recipe

The bundle is made by a run of one step from random weights: 2 prompts × 2 samples × at most 32 tokens. Each phase runs in a
process of its own, so that its memory is its own: the run that writes the bundle; the replay with its two measurements of
rounding; and the same without the rewards.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contestants import train_rlcore
from model_shapes import texts, write_model

NUM_PROMPTS, GROUP, NUM_TOKENS = 2, 2, 32
PROMPT_LENGTH, NUM_ROWS = 12, 8
GIB = 2**30
PHASES = ("run", "replay", "replay without rewards")


def run_phase(phase: str, folder: Path, dtype: str, keys: Sequence[str]) -> dict[str, Any]:
    """One phase in this process: its seconds on the clock and of the processor, and the greatest memory of the process."""
    start = time.perf_counter()
    if phase == "run":
        _record(folder, dtype, keys)
        verdicts: list[str] = []
    else:
        from rlcore_bundles.replay import replay
        from rlcore_bundles.storage import read_bundle

        bundle = read_bundle(folder / "runs" / "run" / "bundles" / "step-000001")
        verdicts = [row.verdict for row in replay(bundle, rewards=phase == "replay").rows]
    used, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - start
    return {
        "seconds": seconds,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_gib": used.ru_maxrss * 1024 / GIB,
        "differing": verdicts.count("differs"),
        "rows": len(verdicts),
    }


def _record(folder: Path, dtype: str, further: Sequence[str]) -> None:
    """The run of one step that writes the bundle."""
    from rlcore.run.report.progress import Progress

    rows = [{"prompt": text} for text in texts(NUM_ROWS, PROMPT_LENGTH)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text("def score(completion):\n    return sum(map(ord, completion)) % 7 / 7\n")
    keys = {
        "run.device": "cpu",
        "run.num_steps": 1,
        "run.directory": str(folder / "runs"),
        "model.path": str(folder / "model"),
        "model.dtype": dtype,
        "algorithm.name": "grpo",
        "environment.name": "function",
        "environment.function.path": f"{folder / 'score.py'}:score",
        "data.train.source": "jsonl",
        "data.train.path": str(folder / "rows.jsonl"),
        "rollout.samples_per_prompt": GROUP,
        "rollout.max_prompt_tokens": PROMPT_LENGTH,
        "rollout.max_response_tokens": NUM_TOKENS,
        "training.prompts_per_step": NUM_PROMPTS,
        "logging.bundles_every_n_steps": 1,
    }
    train_rlcore(keys, Progress(), further)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("keys", nargs="*", help="further keys of the recipe, as key=value")
    parser.add_argument("--quick", action="store_true", help="a tiny shape")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase is not None:
        print(json.dumps(run_phase(arguments.phase, arguments.folder, arguments.dtype, arguments.keys)))
        return
    shape = "tiny" if arguments.quick else arguments.shape
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", shape, "cpu", arguments.dtype)
        print(f"{shape} in {arguments.dtype}: {NUM_PROMPTS} prompts x {GROUP} samples x at most {NUM_TOKENS} tokens, 2 cores")
        print(f"{'phase':<24} {'seconds':>9} {'CPU s':>9} {'peak GiB':>9} {'differing':>9}")
        for phase in PHASES:
            found = measure(phase, folder, arguments.dtype, arguments.keys)
            times = f"{found['seconds']:>9.1f} {found['cpu_s']:>9.1f} {found['peak_gib']:>9.2f}"
            print(f"{phase:<24} {times} {found['differing']:>4} of {found['rows']}", flush=True)


def measure(phase: str, folder: Path, dtype: str, keys: Sequence[str]) -> dict[str, Any]:
    """A phase in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--phase", phase, "--folder", str(folder), "--dtype", dtype, *keys]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{phase} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
