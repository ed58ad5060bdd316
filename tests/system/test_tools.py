"""Tools over several turns, as users run them: template, tokenizer, generator and trainer are real."""

import json

import numpy as np
import pandas
import pytest
from transformers import AutoTokenizer

from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore_torchkit.testing import models

from ..text.chats.chat_templates import FAMILIES, SPECIAL_TOKENS, set_chat_template  # type: ignore[import-not-found]

MARK = "\u241f"
"""Stands for an answer."""
ENVIRONMENT = '''
from attrs import frozen

from rlcore.spi import Observation, Provider, ResetResult, StepResult

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@frozen(kw_only=True)
class Config:
    """Takes no options."""


class Answering:
    """Two results of tools, whatever was said; how much was said is the reward."""

    def __init__(self, context, config):
        pass

    def rows(self, split):
        return [{"prompt": "What is there?"}, {"prompt": "And here?"}]

    async def reset(self, row, seed):
        messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": row["prompt"]}]
        return ResetResult(observation=Observation(messages=messages, tools=[TOOL]), state=0)

    async def step(self, state, turn):
        assert turn.content or turn.tool_calls or not turn.text.strip()
        if state == 2:
            return StepResult(reward=len(turn.text) / 10, done=True)
        result = {"role": "tool", "content": f"result {state}"}
        return StepResult(reward=0.0, done=False, observation=Observation(messages=[result]), state=state + 1)


PROVIDER = Provider(name="answering", spi=(2, 0), config=Config, backend="answering:Answering")
'''
RECIPE = """
[run]
num_steps = 1
device = "cpu"
[model]
path = "model"
[algorithm]
name = "grpo"
[algorithm.grpo]
advantage_per = "turn"
[environment]
name = "answering"
[generator]
name = "transformers"
[training]
prompts_per_step = 2
[rollout]
samples_per_prompt = 4
max_prompt_tokens = 700
max_response_tokens = 400
max_turns = 3
max_turn_tokens = 12
[sinks]
names = []
[checkpoint]
at_end = false
[logging]
rollouts_every_n_steps = 1
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs an environment: its entry point, as an installer would write it."""

    def installed(name, path):
        metadata = tmp_path / "site" / f"rlcore_{name}-0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: rlcore-{name}\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(f"[rlcore.environments]\n{name} = {path}\n")
        monkeypatch.syspath_prepend(str(metadata.parent))
        return metadata.parent

    return installed


def runs(values):
    """[(value, start, end)]: runs of equal values."""
    starts = np.flatnonzero(np.diff(values, prepend=~values[:1]))
    return [(bool(values[start]), start, end) for start, end in zip(starts, [*starts[1:], len(values)], strict=True)]


@pytest.mark.parametrize("family", ["qwen2.5", "llama3.1"])
def test_the_loss_sees_what_the_template_makes_of_the_whole_conversation(family, tmp_path, monkeypatch, install):
    """Every token but the generated ones is that of one rendering of the conversation, with marks in the answers' places."""
    make_tokenizer = models.make_tokenizer

    def with_family(directory, alphabet):
        number = make_tokenizer(directory, alphabet)
        set_chat_template(directory, FAMILIES[family].template, FAMILIES[family].end)
        return number + len(SPECIAL_TOKENS)

    monkeypatch.setattr(models, "make_tokenizer", with_family)
    models.make_model(tmp_path / "model", max_length=1200)
    (install("answering", "answering:PROVIDER") / "answering.py").write_text(ENVIRONMENT)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    train(prepare(tmp_path / "recipe.toml", [f"run.directory={tmp_path / 'runs'}"]), resume=False, progress=Progress())

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    stops = [tokenizer.eos_token_id, 0]
    samples = pandas.read_parquet(tmp_path / "runs" / "run" / "rollouts" / "step-000001.parquet")
    assert len(samples) == 8
    from answering import TOOL  # type: ignore[import-not-found]

    for sample in samples.itertuples():
        question = next(row for row in ("What is there?", "And here?") if row in sample.prompt)
        conversation = [
            {"role": "system", "content": "Look."},
            {"role": "user", "content": question},
            {"role": "assistant", "content": MARK},
            {"role": "tool", "content": "result 0"},
            {"role": "assistant", "content": MARK},
            {"role": "tool", "content": "result 1"},
            {"role": "assistant", "content": MARK},
        ]
        text = tokenizer.apply_chat_template(conversation, tools=[TOOL], tokenize=False)
        expected = [tokenizer(part, add_special_tokens=False).input_ids for part in text.split(MARK)[:3]]
        pieces = runs(np.asarray(sample.loss_mask))
        read = [sample.tokens[start:end].tolist() for generated, start, end in pieces if not generated]
        said = [sample.tokens[start:end].tolist() for generated, start, end in pieces if generated]
        assert len(read) == len(said) == 3
        assert read[0] == expected[0]
        for before, found, whole in zip(said, read[1:], expected[1:], strict=False):
            assert found == (whole[1:] if before[-1] == whole[0] and before[-1] in stops else whole)
        assert all(len(turn) <= 12 for turn in said)
    metrics = json.loads((tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["updates"] == 1
    assert metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)
