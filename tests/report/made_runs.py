"""Run directories made by hand, with texts that mean something in HTML."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from rlcore.run.report.timing import STEP_PHASES, Span, append_timeline

NASTY = "</script><script>alert(1)</script><!-- & \u2028 {{data}} "
"""What would end a script, begin a comment, break a line of JavaScript, or be filled in."""


def make_run(path: Path, num_steps: int, *, every: int = 10, num_figures: int = 8, samples: int = 16, tokens: int = 20) -> Path:
    """A run of `num_steps`, whose samples were kept every so many steps: groups of 4, of `tokens` tokens and a prompt."""
    (path / "rollouts").mkdir(parents=True)
    (path / "recipe.toml").write_text(f'[run]\nname = "{path.name}"\n[optimizer]\nlearning_rate = {num_steps}e-6\n')
    (path / "environment.json").write_text(json.dumps({"distributions": {"torch": "2.13.0"}}))
    random = np.random.default_rng(num_steps)
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(json.dumps(figures(step, num_figures, random)) + "\n")
    for step in range(every, num_steps + 1, every):
        parquet.write_table(rollouts(step, samples, tokens, random), path / "rollouts" / f"step-{step:06d}.parquet")
    spans = [
        Span(step=step, role=role, name=name, start=10.0 * step + at, seconds=seconds)
        for step in range(1, num_steps + 1)
        for role, name, at, seconds in (
            ("driver", "generation", 0.0, (4.0,)),
            ("driver", "train", 4.0, (5.0,)),
            ("trainer", "train_step", 4.0, (4.0, 5.0)),
        )
    ]
    append_timeline(path / "timeline.jsonl", spans)
    lines = [json.dumps({"step": step, "entries": endings(step)}) for step in range(1, num_steps + 1)]
    (path / "failures.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return path


def endings(step: int) -> list[dict[str, object]]:
    """The entries of a step: 12 episodes by the policy, 3 that are masked, one that is asked again."""
    rows = {"row 3": 2, NASTY: 1}
    return [
        entry("policy", "trained", "", episodes=12, reward=6.0, loss_tokens=120, weight=9.0),
        entry("grader", "masked", f"{NASTY} took too long", episodes=3, weight=0.0, rows=rows),
        entry("limit", "trained", "cut off", episodes=1, loss_tokens=20, weight=3.0, rows={f"row {step}": 1}),
        entry("tool", "asked again", "no search", episodes=1),
    ]


def entry(kind: str, outcome: str, reason: str, **figures: object) -> dict[str, object]:
    """An entry as rlcore-rollout writes it."""
    counted = {"episodes": 1, "reward": 0.0, "generated": 40, "loss_tokens": 0, "rows": {}}
    return {"kind": kind, "outcome": outcome, "reason": reason, **counted, **figures}


def figures(step: int, num: int, random: np.random.Generator) -> dict[str, float]:
    named = {"step": step, "reward_mean": 1 - math.exp(-step / 300), "loss": math.nan if step % 50 == 7 else 1 / step}
    times = {f"time/{name}_s": float(random.random()) for name in (*STEP_PHASES, "other")}
    others = {f"figure/{number}": float(random.normal()) for number in range(num)}
    return {**named, "time/total_s": sum(times.values()), "tokens_per_second": 1000.0, **times, **others}


def rollouts(step: int, num: int, num_tokens: int, random: np.random.Generator) -> pa.Table:
    """The table of a step, with texts that are made to harm and a reward that is no number."""
    lengths = random.integers(1, num_tokens + 1, num)
    masks = [[False, False, *([True] * int(length))] for length in lengths]
    rewards = random.random(num).astype(np.float32)
    rewards[0] = np.nan
    return pa.table(
        {
            "step": np.full(num, step),
            "group": (np.arange(num) // 4).astype(np.int32),
            "prompt": [f"{NASTY} {index // 4}" for index in range(num)],
            "response": [f"{NASTY} answer {index}" for index in range(num)],
            "reward": rewards,
            "success": rewards > 0.5,
            "valid": np.arange(num) % 7 != 3,
            "finish_reason": ["stop"] * num,
            "num_generated": lengths,
            "tokens": [list(range(len(mask))) for mask in masks],
            "loss_mask": masks,
            "generation_logprobs": [[-float(random.exponential()) if on else 0.0 for on in mask] for mask in masks],
            "advantages": [[0.5 if on else 0.0 for on in mask] for mask in masks],
        }
    )
