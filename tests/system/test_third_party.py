"""A distribution of a third party: found when it is installed, named in a recipe, and used."""

import json
import os
import subprocess
import sys

import pandas

from .system_support import Site, Workplace, read_metrics  # type: ignore[import-not-found]

KIT = '''
from attrs import frozen
import numpy as np
from rlcore.spi import (
    AlgorithmNeeds, LossSpec, Observation, Provider, ResetResult, StepResult, TrainingBatch, capabilities, hookimpl,
)


@frozen(kw_only=True)
class KitConfig:
    """`[trainer.kit]`, `[algorithm.kit]`, `[environment.kit]`"""
    letter: str = "7"
    """What is rewarded."""


class Trainer:
    """Delegates to another backend, and counts its steps."""

    def __init__(self, context, config):
        from rlcore_fsdp2.backend import Fsdp2Backend
        from rlcore_fsdp2.config import Fsdp2Config
        self.inner = Fsdp2Backend(context, Fsdp2Config())
        self.layout, self.num_steps = self.inner.layout, 0

    @hookimpl
    def train_step(self, request):
        from attrs import evolve
        self.num_steps += 1
        result = self.inner.train_step(request)
        return evolve(result, metrics={**result.metrics, "kit/steps": float(self.num_steps)})

    @hookimpl
    def get_logprobs(self, request):
        return self.inner.get_logprobs(request)

    @hookimpl
    def export_weights(self, request):
        return self.inner.export_weights(request)

    @hookimpl
    def set_residency(self, request):
        return self.inner.set_residency(request)

    @hookimpl
    def save_state(self, request):
        return self.inner.save_state(request)

    @hookimpl
    def load_state(self, request):
        return self.inner.load_state(request)

    @hookimpl
    def close(self, request):
        return self.inner.close(request)


class Reinforce:
    """Each token's log-probability, weighed by its sample's reward less the step's mean."""

    def __init__(self, context, config):
        self.needs = AlgorithmNeeds(source="rollouts")
        self.loss = LossSpec(path="acme_kit:loss", config=config, token_columns=("advantages",))

    def build_batch(self, rollouts):
        advantages = (rollouts.rewards - rollouts.rewards.mean()).astype(np.float32)
        per_token = np.where(rollouts.batch.loss_mask, np.repeat(advantages, rollouts.batch.lengths), np.float32(0))
        return TrainingBatch(batch=rollouts.batch.with_token_column("advantages", per_token), loss=self.loss)


def loss(inputs, config):
    from rlcore.spi import LossOutput
    weighed = inputs.logprobs * inputs.token_columns["advantages"]
    return LossOutput(loss=-(weighed * inputs.loss_mask).sum() / inputs.counts.num_loss_tokens)


class Letters:
    """Rewards one letter."""

    def __init__(self, context, config):
        self.letter = config.letter

    def rows(self, split):
        return [{"prompt": prompt} for prompt in ("1+1=", "2+2=", "3+3=")]

    async def reset(self, row, seed):
        return ResetResult(observation=Observation(text=row["prompt"]), state=None)

    async def step(self, state, turn):
        share = turn.text.count(self.letter) / max(len(turn.text), 1)
        return StepResult(reward=share, done=True, success=share > 0.5)


CAPABILITIES = {"refit.in_process", capabilities.ENTROPY, "acme:counting"}
FIELDS = {"name": "kit", "spi": (2, 0), "config": KitConfig}
TRAINER = Provider(**FIELDS, backend="acme_kit:Trainer", priority=90, capabilities=CAPABILITIES)
ALGORITHM = Provider(**FIELDS, backend="acme_kit:Reinforce")
ENVIRONMENT = Provider(**FIELDS, backend="acme_kit:Letters", capabilities={capabilities.CHEAP_RESET})
'''
ENTRY_POINTS = {
    "rlcore.trainers": {"kit": "TRAINER"},
    "rlcore.algorithms": {"kit": "ALGORITHM"},
    "rlcore.environments": {"kit": "ENVIRONMENT"},
}
RECIPE = """
extends = "grpo.toml"
[run]
name = "kit"
num_steps = 12
[algorithm]
name = "kit"
[environment]
name = "kit"
[environment.kit]
letter = "5"
"""


def test_an_installed_distribution_is_listed_and_used(workplace: Workplace, site: Site) -> None:
    site.install("acme-kit", KIT, ENTRY_POINTS)
    (workplace.folder / "kit.toml").write_text(RECIPE)

    def rlcore(*arguments: str) -> str:
        """A process of its own, to which the distribution is installed as to any other."""
        command = [sys.executable, "-c", "from rlcore.cli.main import main; main()", *arguments]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(site.folder)},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    listing = json.loads(workplace.rlcore("plugins", "--json").stdout)
    ours = [plugin for plugin in listing["plugins"] if plugin["distribution"] == "acme-kit"]
    assert [(plugin["role"], plugin["name"], plugin["version"], plugin["usable"]) for plugin in ours] == [
        ("trainer", "kit", "1.0", True),
        ("algorithm", "kit", "1.0", True),
        ("environment", "kit", "1.0", True),
    ]
    assert listing["auto"]["trainer"] == {"name": "kit", "error": None}
    assert ours[0]["capabilities"] == ["acme:counting", "entropy", "refit.in_process"]

    output = rlcore("train", "kit.toml")
    run = workplace.run("kit")
    records = read_metrics(run)
    assert [record["kit/steps"] for record in records[1:]] == list(range(1, 13))
    assert records[-1]["reward_mean"] > records[1]["reward_mean"] + 0.3, output
    samples = pandas.read_parquet(run / "rollouts" / "step-000012.parquet")
    assert [text.count("5") / max(len(text), 1) for text in samples["response"]] == samples["reward"].round(6).tolist()
    assert json.loads((run / "environment.json").read_text())["distributions"]["acme-kit"] == "1.0"


def test_what_a_third_party_lacks_is_said_before_anything_is_allocated(workplace: Workplace, site: Site) -> None:
    site.install("acme-kit", KIT, ENTRY_POINTS)
    needs = "lacks the capability 'save_hf' (checkpoint.export = \"hf\")"
    for name in ("kit", "auto"):
        result = workplace.rlcore("check", "grpo.toml", f"trainer.name={name}", "checkpoint.export=hf")
        if name == "auto":
            assert "trainer       fsdp2" in result.stdout
            continue
        assert result.exit_code == 3
        assert f"trainer 'kit' is not usable: {needs}" in result.stderr
    result = workplace.rlcore("check", "grpo.toml", "trainer.kit.leter=x", "trainer.name=kit")
    assert result.exit_code == 2
    assert "trainer.kit.leter: found an unknown key" in result.stderr
    assert "Did you mean trainer.kit.letter?" in result.stderr
