"""REINFORCE++ from a run's tokens to its advantages, against transformers' own log-probabilities of the initial model."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from numpy.typing import NDArray

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, RolloutBatch, TrainingBatch
from rlcore_fsdp2.provider import PROVIDER as FSDP2
from rlcore_grpo.algorithm import Grpo
from rlcore_grpo.presets import REINFORCE_PP
from rlcore_math.provider import ARITHMETIC
from rlcore_torchkit.testing.models import make_model
from rlcore_transformers.provider import PROVIDER as TRANSFORMERS

BETA, TEMPERATURE, MAX_TOKENS = 0.5, 1.5, 4
RECIPE = """\
[model]
path = "{model}"
[run]
num_steps = 3
[algorithm]
name = "reinforce_pp"
[algorithm.reinforce_pp]
kl_coefficient = {beta}
length_penalty = "linear"
[environment]
name = "arithmetic"
[environment.arithmetic]
max_operand = 9
num_train = 32
num_evaluation = 8
partial_credit = 0.5
[rollout]
samples_per_prompt = 1
temperature = {temperature}
max_prompt_tokens = 4
max_response_tokens = {max_tokens}
[training]
prompts_per_step = 24
[optimizer]
learning_rate = 0.005
[sinks]
names = []
[checkpoint]
at_end = false
"""
STEPS: list[tuple[RolloutBatch, TrainingBatch]] = []


class Recorded(Grpo):
    """Keeps what it gets and what it makes of it."""

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        training = super().build_batch(rollouts)
        STEPS.append((rollouts, training))
        return training


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("kl") / "model", hidden_size=16, num_layers=1, alphabet="0123456789+=", max_length=16
    )


def reference_logprobs(model: Path, rollouts: RolloutBatch) -> NDArray[np.float64]:
    """[T]: log p(token | those before it) of the model as transformers computes it, at the sampling temperature."""
    from transformers import AutoModelForCausalLM

    initial = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    found = np.zeros(rollouts.batch.num_tokens)
    for start, end in itertools.pairwise(rollouts.batch.offsets.tolist()):
        tokens = torch.tensor(rollouts.batch.tokens[start:end], dtype=torch.int64)
        with torch.no_grad():
            logprobs = torch.log_softmax(initial(tokens[None]).logits[0] / TEMPERATURE, -1)
        found[start + 1 : end] = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    return found


def test_advantages_are_rewards_less_the_divergence_from_the_initial_model_to_go(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A_t = r - β Σ_{i≥t} (log π - log π_ref), whitened over the step's tokens (arXiv:2501.03262), with rewards that differ by
    the length at least. Single samples do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=model, beta=BETA, temperature=TEMPERATURE, max_tokens=MAX_TOKENS))
    algorithm = evolve(REINFORCE_PP, backend=f"{__name__}:Recorded")
    providers = {"trainer": [FSDP2], "generator": [TRANSFORMERS], "algorithm": [algorithm], "environment": [ARITHMETIC]}
    plan = prepare(tmp_path / "recipe.toml", registry=Registry.from_providers(providers))
    STEPS.clear()  # of the batch that the algorithm is tried on
    train(plan, resume=False, progress=Progress())
    assert len(STEPS) == 3
    for rollouts, training in STEPS:
        batch = rollouts.batch
        assert len(set(batch.loss_lengths.tolist())) > 1
        divergence = batch.token_columns[GENERATION_LOGPROBS].astype(np.float64) - reference_logprobs(model, rollouts)
        values = []
        for reward, (start, end) in zip(rollouts.rewards, itertools.pairwise(batch.offsets.tolist()), strict=True):
            said = start + np.flatnonzero(batch.loss_mask[start:end])
            values += [
                float(reward) - len(said) / MAX_TOKENS - BETA * divergence[said[place:]].sum() for place in range(len(said))
            ]
        expected = (np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)
        found = training.batch.token_columns[ADVANTAGES]
        np.testing.assert_allclose(found[batch.loss_mask], expected, rtol=1e-3, atol=1e-3)
        assert not found[~batch.loss_mask].any()
        kl = divergence[batch.loss_mask].mean()
        assert training.metrics["reward_kl"] == pytest.approx(kl, abs=1e-5)
    assert abs(STEPS[-1][1].metrics["reward_kl"]) > 1e-3
