"""A step of a run with the fakes, whose episodes are rollouts of the real package."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rlcore_verifiers.package import unavailable

if missing := unavailable():
    pytest.skip(missing, allow_module_level=True)

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_GENERATOR, FAKE_TRAINER
from rlcore_verifiers.provider import VERIFIERS

RECIPE = """
[model]
path = "none"
[algorithm]
name = "fake"
[environment]
name = "verifiers"
[environment.verifiers]
name = "verifiers-worlds"
args = { kind = "twice" }
[data.evaluation]
[run]
num_steps = 1
[training]
prompts_per_step = 2
[rollout]
samples_per_prompt = 2
max_prompt_tokens = 200
max_response_tokens = 8
[logging]
rollouts_every_n_steps = 1
[sinks]
names = []
[evaluation]
at_start = false
"""


def test_a_step_trains_on_what_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    registry = Registry.from_providers(
        {"trainer": [FAKE_TRAINER], "generator": [FAKE_GENERATOR], "algorithm": [FAKE_ALGORITHM], "environment": [VERIFIERS]}
    )
    plan = prepare(tmp_path / "recipe.toml", [f"run.directory={tmp_path / 'runs'}"], registry=registry)
    summary = train(plan, resume=False, progress=Progress(), tokenizer=FakeTokenizer())
    assert summary["steps"] == 1
    (directory,) = (tmp_path / "runs").iterdir()
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    step = next(line for line in metrics if "environment/num_turns" in line)
    assert 1 <= step["environment/num_turns"] <= 2
    assert step["environment/segments_per_episode"] == 1
    assert 0 <= step["environment/right"] <= 1
    assert any(name.startswith("eval/") for line in metrics for name in line)
    samples = pd.concat(map(pd.read_parquet, directory.rglob("*.parquet")))
    assert len(samples) >= 4
    for sample in samples.itertuples():
        mask = np.asarray(sample.loss_mask)
        assert mask.any()
        assert (np.asarray(sample.weight_versions)[mask] >= 0).all()
