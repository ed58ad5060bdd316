"""An agent that asks for a JSON Schema, trained for a step: the loss normalises over the tokens that the schema left."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import LossInputs, LossOutput, RewardError, RolloutBatch, TrainingBatch
from rlcore_fsdp2.provider import PROVIDER as FSDP2
from rlcore_grpo.algorithm import Grpo
from rlcore_grpo.provider import PROVIDER as GRPO
from rlcore_serve.provider import AGENT
from rlcore_torchkit.rl.policy_gradient import policy_gradient_loss
from rlcore_torchkit.testing.models import make_model
from rlcore_transformers.provider import PROVIDER as TRANSFORMERS

ROLLOUTS: list[RolloutBatch] = []
LOSSES: list[tuple[Any, Any]] = []
"""The batches that the algorithm got, and trainer's and generator's log-probabilities of each microbatch's loss tokens."""

AGENT_SOURCE = """
import json, openai

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 20}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}

async def run(task, client):
    options = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    messages = [{"role": "user", "content": task["prompt"]}]
    try:
        found = await client.openai.chat.completions.create(model=client.model, messages=messages, response_format=options)
    except openai.BadRequestError as error:
        with open(__file__ + ".refused", "w") as file:
            file.write(error.message)
        raise
    answer = json.loads(found.choices[0].message.content)
    free = await client.openai.chat.completions.create(model=client.model, messages=messages, max_tokens=3)
    return {"reward": float(answer["sum"] == 2 and set(answer) == {"sum", "sure"})}
"""
RECIPE = """
[run]
num_steps = 1
device = "cpu"
[model]
path = "{model}"
dtype = "float32"
[algorithm]
name = "grpo"
[environment]
name = "agent"
[environment.agent]
function = "{agent}:run"
[data.train]
source = "jsonl"
path = "{data}"
[rollout]
samples_per_prompt = 3
max_prompt_tokens = 100
max_response_tokens = 60
[training]
prompts_per_step = 2
[evaluation]
at_start = false
at_end = false
[sinks]
names = []
"""


class Recording(Grpo):
    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        ROLLOUTS.append(rollouts)
        batch = super().build_batch(rollouts)
        return evolve(batch, loss=evolve(batch.loss, path=f"{__name__}:recording_loss"))


def recording_loss(inputs: LossInputs, config: Any) -> LossOutput:
    mask, generated = inputs.loss_mask, inputs.token_columns["generation_logprobs"]
    LOSSES.append((inputs.logprobs.detach()[mask].numpy().copy(), generated[mask].numpy().copy()))
    return policy_gradient_loss(inputs, config)


REGISTRY = Registry.from_providers(
    {
        "trainer": [FSDP2],
        "generator": [TRANSFORMERS],
        "algorithm": [evolve(GRPO, backend=f"{__name__}:Recording")],
        "environment": [AGENT],
    }
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ROLLOUTS.clear()
    LOSSES.clear()
    (tmp_path / "agent.py").write_text(AGENT_SOURCE)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in ("a", "b")))
    make_model(tmp_path / "model")
    recipe = RECIPE.format(model=tmp_path / "model", data=tmp_path / "data.jsonl", agent=tmp_path / "agent.py")
    (tmp_path / "recipe.toml").write_text(recipe)
    return tmp_path


def trained(folder: Path, *options: str) -> Any:
    plan = prepare(folder / "recipe.toml", [f"run.directory={folder / 'runs'}", *options], registry=REGISTRY)
    return train(plan, resume=False, progress=Progress())


def test_the_loss_normalises_over_the_tokens_that_the_schema_left(folder: Path) -> None:
    """Trainer and generator agree on every token, constrained or free; with the whole vocabulary they would be nats apart."""
    assert trained(folder, "rollout.top_k=40")["steps"] == 1
    rollouts = ROLLOUTS[-1]
    assert rollouts.batch.sampling_mask is not None
    lengths = rollouts.batch.sampling_mask.lengths[rollouts.batch.loss_mask]
    assert (lengths == 1).any(), "the schema forces some tokens"
    assert (lengths == 40).any(), "free answers are truncated alone"
    own, generated = (np.concatenate(part) for part in zip(*LOSSES, strict=True))
    np.testing.assert_allclose(own, generated, atol=1e-4)
    assert (generated[lengths == 1] == 0).all()


def test_it_is_refused_where_samples_do_not_say_what_they_were_chosen_among(folder: Path) -> None:
    with pytest.raises(RewardError) as raised:
        trained(folder)
    assert "in a session that a run trains on" in str(raised.value)
    assert "rollout.top_k" in (folder / "agent.py.refused").read_text()
