"""Conversations on Qwen3's chat template, which strips earlier thoughts, trained for a step with the default of
rollout.history: an environment of several turns and an agent over the session endpoint have the same segments."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import (
    EPISODE_IDS,
    EnvironmentContext,
    LossInputs,
    LossOutput,
    Observation,
    Provider,
    ResetResult,
    RolloutBatch,
    Row,
    StepResult,
    TrainingBatch,
    Turn,
)
from rlcore_fsdp2.provider import PROVIDER as FSDP2
from rlcore_grpo.algorithm import Grpo
from rlcore_grpo.provider import PROVIDER as GRPO
from rlcore_serve.provider import AGENT
from rlcore_torchkit.rl.policy_gradient import policy_gradient_loss
from rlcore_torchkit.testing import models
from rlcore_transformers.provider import PROVIDER as TRANSFORMERS

from ..text.chats.chat_templates import FAMILIES, SPECIAL_TOKENS, set_chat_template  # type: ignore[import-not-found]

THOUGHTS, END = ("<think>", "</think>"), "<|im_end|>"
MORE = ("Are you sure?", "Really?")
ROLLOUTS: list[RolloutBatch] = []
LOSSES: list[dict[str, Any]] = []
"""The batches that the algorithm and the loss of this process got."""
SAID: list[tuple[str, list[str]]] = []
"""The prompt of each episode, and the texts of its turns, as its environment or its agent saw them."""


@frozen(kw_only=True)
class Config:
    """Takes no options."""


class Asking:
    """Asks twice more, whatever was said."""

    def __init__(self, context: EnvironmentContext, config: Config) -> None:
        pass

    def rows(self, split: str) -> Sequence[Row] | None:
        return None

    async def reset(self, row: Row, seed: int) -> ResetResult:
        return ResetResult(
            observation=Observation(messages=[{"role": "user", "content": row["prompt"]}]), state=(row["prompt"],)
        )

    async def step(self, state: tuple[str, ...], turn: Turn) -> StepResult:
        prompt, *said = (*state, turn.text)
        if len(said) > len(MORE):
            SAID.append((prompt, said))
            return StepResult(reward=float(len(set("".join(said)))), done=True)
        messages = [{"role": "user", "content": MORE[len(said) - 1]}]
        return StepResult(reward=0.0, done=False, observation=Observation(messages=messages), state=(prompt, *said))


ASKING = Provider(name="asking", spi=(2, 0), config=Config, backend=f"{__name__}:Asking")


async def ask(task: Row, client: Any) -> float:
    """The same as an agent, which sends the whole chat each time."""
    messages, said = [{"role": "user", "content": task["prompt"]}], list[str]()
    for question in (*MORE, None):
        answer = await client.openai.chat.completions.create(model=client.model, messages=messages, max_tokens=24)
        said.append(answer.choices[0].message.content)
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": question}]
    SAID.append((task["prompt"], said))
    return float(len(set("".join(said))))


class Recording(Grpo):
    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        ROLLOUTS.append(rollouts)
        batch = super().build_batch(rollouts)
        return evolve(batch, loss=evolve(batch.loss, path=f"{__name__}:recording_loss"))


def recording_loss(inputs: LossInputs, config: Any) -> LossOutput:
    mask = inputs.loss_mask.numpy()
    LOSSES.append(
        {
            "trained": inputs.logprobs.detach().numpy()[mask],
            "generated": inputs.token_columns["generation_logprobs"].numpy()[mask],
            "references": inputs.token_columns["reference_logprobs"].numpy()[mask],
        }
    )
    return policy_gradient_loss(inputs, config)


REGISTRY = Registry.from_providers(
    {
        "trainer": [FSDP2],
        "generator": [TRANSFORMERS],
        "algorithm": [evolve(GRPO, backend=f"{__name__}:Recording")],
        "environment": [AGENT, ASKING],
    }
)
RECIPE = """
[run]
num_steps = 1
device = "cpu"
[model]
path = "{model}"
dtype = "float32"
[algorithm]
name = "grpo"
[algorithm.grpo]
loss_normalisation = "sequence"
kl_coefficient = 0.1
[environment]
name = "{environment}"
{options}
[data.train]
source = "jsonl"
path = "{data}"
[rollout]
samples_per_prompt = 4
max_prompt_tokens = 500
{rollout}
[training]
prompts_per_step = 2
max_tokens_per_microbatch = 600
[evaluation]
at_start = false
at_end = false
[sinks]
names = []
[logging]
rollouts_every_n_steps = 1
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model with Qwen3's template, and a token for each mark of a thought."""
    make_tokenizer = models.make_tokenizer

    def with_thoughts(directory: Path, alphabet: str) -> int:
        from tokenizers import Tokenizer

        number = make_tokenizer(directory, alphabet)
        set_chat_template(directory, FAMILIES["qwen3"].template, FAMILIES["qwen3"].end)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_tokens(list(THOUGHTS))
        tokenizer.save(str(directory / "tokenizer.json"))
        return number + len(SPECIAL_TOKENS) + len(THOUGHTS)

    monkeypatch.setattr(models, "make_tokenizer", with_thoughts)
    return models.make_model(tmp_path / "model", max_length=1200)


KINDS = {
    "environment": ("asking", "", "max_turns = 3\nmax_turn_tokens = 24\nmax_response_tokens = 300"),
    "agent": ("agent", f'[environment.agent]\nfunction = "{__name__}:ask"', "max_response_tokens = 300"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_sampled_token_is_trained_once_in_the_context_that_it_was_sampled_in(
    tmp_path: Path, model: Path, kind: str
) -> None:
    from transformers import AutoTokenizer

    for record in (ROLLOUTS, LOSSES, SAID):
        record.clear()
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in ("a", "b")))
    name, options, rollout = KINDS[kind]
    text = RECIPE.format(model=model, data=tmp_path / "data.jsonl", environment=name, options=options, rollout=rollout)
    (tmp_path / "recipe.toml").write_text(text)
    plan = prepare(tmp_path / "recipe.toml", [f"run.directory={tmp_path / 'runs'}"], registry=REGISTRY)
    assert plan.recipe.rollout.history == "segment"
    assert train(plan, resume=False, progress=Progress())["steps"] == 1

    rollouts, tokenizer = ROLLOUTS[-1], AutoTokenizer.from_pretrained(model)
    batch, owner = rollouts.batch, rollouts.batch.sequence_columns[EPISODE_IDS]
    assert len(rollouts.first_sequences) == 8 < batch.num_sequences
    found: dict[int, list[str]] = {}
    for episode, tokens, (start, end) in zip(owner.tolist(), batch.sequences(), pairwise(batch.offsets), strict=True):
        found.setdefault(episode, []).append(shown(tokens, batch.loss_mask[start:end], tokenizer))
    expected = [as_rendered(prompt, said, tokenizer) for prompt, said in SAID]
    assert sorted(found.values()) == sorted(expected)
    assert any("</think>" in said for _, (*earlier, _) in SAID for said in earlier)
    trained, generated, references = (np.concatenate([one[part] for one in LOSSES]) for part in LOSSES[0])
    assert len(trained) == batch.loss_mask.sum() > 0
    np.testing.assert_allclose(trained, generated, atol=1e-4)  # float32 on both sides
    np.testing.assert_allclose(references, generated, atol=1e-4)
    (metrics,) = [json.loads(line) for line in next(tmp_path.glob("runs/*/metrics.jsonl")).read_text().splitlines()]
    assert metrics["environment/segments_per_episode"] == batch.num_sequences / 8
    assert metrics["updates"] == 1


def as_rendered(prompt: str, said: Sequence[str], tokenizer: Any) -> list[str]:
    """The segments of an episode, by transformers: what the template shows before each answer, which begins another segment
    where it does not begin with what there was. Answers stand in brackets."""
    segments, plain, messages = list[str](), "", [{"role": "user", "content": prompt}]
    for answer, question in zip(said, (*MORE, ""), strict=True):
        opened: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if segments and opened.startswith(plain):
            segments[-1] += f"{opened[len(plain) :]}[{answer}]"
        else:
            segments.append(f"{opened}[{answer}]")
        plain = opened + answer
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return segments


def shown(tokens: Any, mask: Any, tokenizer: Any) -> str:
    """A sequence as text, with the policy's answers in brackets. The token that ends an answer is the template's there."""
    edges = [*np.flatnonzero(np.diff(mask, prepend=~mask[:1])).tolist(), len(tokens)]
    text = ""
    for start, end in pairwise(edges):
        part = tokens[start:end].tolist()
        if mask[start]:
            text += f"[{tokenizer.decode(part, skip_special_tokens=True)}]"
            if part[-1] == tokenizer.convert_tokens_to_ids(END) and end < len(tokens):
                text += END
        else:
            text += tokenizer.decode(part)
    return text
