"""Agents with OpenAI's own client, trained for a step by fsdp2 on what the generator transformers sampled for them."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import LossInputs, LossOutput, RolloutBatch, TrainingBatch
from rlcore_fsdp2.provider import PROVIDER as FSDP2
from rlcore_grpo.algorithm import Grpo
from rlcore_grpo.provider import PROVIDER as GRPO
from rlcore_serve.provider import AGENT
from rlcore_torchkit.rl.policy_gradient import policy_gradient_loss
from rlcore_torchkit.testing.models import make_model
from rlcore_transformers.provider import PROVIDER as TRANSFORMERS

ROLLOUTS: list[RolloutBatch] = []
LOSSES: list[dict[str, Any]] = []
"""The batches that the algorithm and the loss of this process got."""

AGENT_SOURCE = '''
import asyncio, json, os, sys

async def converse(client, model, task):
    """Two turns, and a second answer to the first question: two sequences. Writes down what it was told."""
    messages = [{"role": "user", "content": task["prompt"]}]
    seen = []
    async def ask():
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=6, logprobs=True)
        choice = answer.choices[0]
        said = [[one.token, one.logprob] for one in choice.logprobs.content]
        seen.append({"messages": list(messages), "said": said, "read": answer.usage.prompt_tokens})
        return choice.message.content
    first = await ask()
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    second = await ask()
    messages[:] = [{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": "mine"}]
    messages.append({"role": "user", "content": "again"})
    await ask()
    with open(os.path.join(os.path.dirname(__file__), "seen.jsonl"), "a") as file:
        file.write(json.dumps(seen) + "\\n")
    return float(len(set(first + second)))

async def run(task, client):
    return {"reward": await converse(client.openai, client.model, task), "asked": 3}

if __name__ == "__main__":
    import openai
    client = openai.AsyncOpenAI()
    reward = asyncio.run(converse(client, os.environ["OPENAI_MODEL"], json.load(sys.stdin)))
    print(json.dumps({"reward": reward, "asked": 3}))
'''
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
{agent}
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
        loss = evolve(batch.loss, path=f"{__name__}:recording_loss")
        return evolve(batch, loss=loss)


def recording_loss(inputs: LossInputs, config: Any) -> LossOutput:
    LOSSES.append(
        {
            "mask": inputs.loss_mask.numpy().copy(),
            "logprobs": inputs.logprobs.detach().numpy().copy(),
            "offsets": inputs.offsets.numpy().copy(),
            "generation": inputs.token_columns["generation_logprobs"].numpy().copy(),
            "advantages": inputs.token_columns["advantages"].numpy().copy(),
        }
    )
    return policy_gradient_loss(inputs, config)


REGISTRY = Registry.from_providers(
    {
        "trainer": [FSDP2],
        "generator": [TRANSFORMERS],
        "algorithm": [evolve(GRPO, backend=f"{__name__}:Recording")],
        "environment": [AGENT],
    }
)


@pytest.mark.parametrize("kind", ["function", "command"])
def test_the_loss_sees_exactly_what_the_agent_was_told(tmp_path: Path, kind: str) -> None:
    ROLLOUTS.clear()
    LOSSES.clear()
    source = tmp_path / "agent.py"
    source.write_text(AGENT_SOURCE)
    function, command = json.dumps(f"{source}:run"), json.dumps([sys.executable, str(source)])
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in ("a", "b")))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        RECIPE.format(
            model=make_model(tmp_path / "model"),
            data=tmp_path / "data.jsonl",
            agent=f"function = {function}" if kind == "function" else f"command = {command}",
        )
    )
    plan = prepare(recipe, [f"run.directory={tmp_path / 'runs'}"], registry=REGISTRY)
    summary = train(plan, resume=False, progress=Progress())
    assert summary["steps"] == 1

    _, rollouts = ROLLOUTS  # behind the made-up samples of the check
    batch = rollouts.batch
    assert batch.num_sequences == 2 * 3 * 2
    np.testing.assert_array_equal(rollouts.episode_of, np.repeat(np.arange(6), 2))
    np.testing.assert_array_equal(rollouts.group_ids, np.repeat([0, 1], 6))
    episodes = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert sorted(map(json.dumps, told(episodes))) == sorted(map(json.dumps, learnt(rollouts, tmp_path / "model")))

    masks = np.concatenate([one["mask"] for one in LOSSES])
    assert masks.sum() == batch.loss_mask.sum() > 0
    for one in LOSSES:  # float32 on both sides: the trainer's log-probabilities of these tokens are the recorded ones
        np.testing.assert_allclose(one["logprobs"][one["mask"]], one["generation"][one["mask"]], atol=1e-4)
        for start, end in zip(one["offsets"], one["offsets"][1:], strict=False):
            inside = one["advantages"][start:end][one["mask"][start:end]]
            assert (inside == inside[:1]).all()
    metrics = [json.loads(line) for line in next(tmp_path.glob("runs/*/metrics.jsonl")).read_text().splitlines()]
    assert metrics[-1]["environment/asked"] == 3
    assert metrics[-1]["environment/segments_per_episode"] == 2


def told(episodes: list[Any]) -> list[list[Any]]:
    """What each sequence's answers were, by what the agents were told: two answers, then one."""
    return [part for first, second, third in episodes for part in ([first["said"], second["said"]], [third["said"]])]


def learnt(rollouts: RolloutBatch, model: Path) -> list[list[Any]]:
    """The same by what the algorithm got: runs of tokens in the loss, as text, with their log-probabilities."""
    from transformers import AutoTokenizer

    tokenizer, batch, found = AutoTokenizer.from_pretrained(model), rollouts.batch, []
    for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        answers: list[Any] = []
        for place in range(start, end):
            if batch.loss_mask[place]:
                if not batch.loss_mask[place - 1]:
                    answers.append([])
                logprob = float(batch.token_columns["generation_logprobs"][place])
                answers[-1].append([tokenizer.decode([int(batch.tokens[place])]), logprob])
        found.append(answers)
    return found
