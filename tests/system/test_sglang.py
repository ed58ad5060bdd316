"""A run with `sglang` and `fsdp2`: rewards teach, and the two agree on log-probabilities."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from rlcore_sglang.requirements import unavailable

if missing := unavailable():
    pytest.skip(missing, allow_module_level=True)

from .system_support import Workplace, read_metrics, write_jsonl  # type: ignore[import-not-found]

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(a + b)} for a in range(5) for b in range(5)]
OPTIONS = (
    "environment.arithmetic.partial_credit=0.0",
    "data.train.source=jsonl",
    "data.train.path=sums.jsonl",
    "data.evaluation.source=jsonl",
    "data.evaluation.path=sums.jsonl",
    "rollout.max_response_tokens=2",
    "checkpoint.export=hf",
)


def test_rewards_teach(tmp_path: Path, model: Path) -> None:
    workplace = Workplace.make(tmp_path, model)
    write_jsonl(tmp_path / "sums.jsonl", SUMS)
    with contextlib.chdir(tmp_path):
        workplace.train("sft.toml", *OPTIONS, "run.num_steps=15", "training.prompts_per_step=25")
        (tmp_path / "second.toml").write_text(
            'extends = ["grpo.toml"]\n[run]\nname = "second"\nnum_steps = 20\n[model]\npath = "runs/sft/model"\n'
            "[training]\nprompts_per_step = 25\n[optimizer]\nlearning_rate = 3e-3\n"
            '[generator]\nname = "sglang"\n[generator.sglang]\nmax_total_tokens = 8192\n'
        )
        grpo = workplace.train("second.toml", *OPTIONS, "rollout.samples_per_prompt=8")
    records = read_metrics(grpo)[1:]
    rewards = [record["reward_mean"] for record in records]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.15
    assert all(record["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4) for record in records if record["updates"])
