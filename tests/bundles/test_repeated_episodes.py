"""Episodes of several turns, with tools and by agents, that are repeated with their recorded answers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve

import rlcore
from rlcore.run.execution.groups import InProcessGenerator
from rlcore.spi import (
    EPISODE_IDS,
    GENERATION_LOGPROBS,
    GROUP_IDS,
    WEIGHT_VERSIONS,
    FinishReason,
    GenerateResult,
    TokenBatch,
    TurnRewards,
)
from rlcore.spi.arrays import offsets_of
from rlcore.spi.execution import Responses
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.difference import first_difference
from rlcore_bundles.recorded_answers import answers_of
from rlcore_bundles.replay import replay
from rlcore_bundles.rows import Row
from rlcore_bundles.storage import read_bundle
from rlcore_math import calculator
from rlcore_torchkit.testing.models import CHAT_TEMPLATE, make_model

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
AGENT = """
import os, sys

async def run(task, client):
    messages = [{"role": "user", "content": task["prompt"]}]
    said = []
    for turn in range(2):
        answer = await client.openai.chat.completions.create(model=client.model, messages=messages, max_tokens=4)
        said.append(answer.choices[0].message.content)
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "more"}]
    return {"reward": float(len(set("".join(said)))), "first": float(len(said[0]))}
"""


def _recipe(folder: Path, environment: dict[str, Any]) -> dict[str, Any]:
    make_model(folder / "model", max_length=512)
    return {
        "model": {"path": str(folder / "model")},
        "algorithm": {"name": "grpo"},
        "environment": environment,
        "run": {"directory": str(folder / "runs"), "num_steps": 1, "device": "cpu"},
        "rollout": {"samples_per_prompt": 2, "max_prompt_tokens": 120, "max_response_tokens": 200},
        "training": {"prompts_per_step": 2, "max_token_mult_prob_error": float("inf")},
        "evaluation": {"at_start": False, "at_end": False},
        "checkpoint": {"at_end": False},
        "sinks": {"names": []},
        "logging": {"bundles_every_n_steps": 1},
    }


def _scripted(self: InProcessGenerator, feed: Any, weight_version: int) -> None:
    """A policy that calls the calculator, and then says its result; every second sample says another number."""
    first = 0
    decoder: Any = self.decoder
    while (requests := feed.take(wait=True)) is not None:
        for request in requests:
            texts = []
            for number, prompt in enumerate(request.prompts.sequences()):
                shown = decoder.decode(prompt.tolist())
                problem = shown.partition("user: ")[2].partition("\n")[0].partition("=")[0].strip()
                for sample in range(request.num_samples):
                    result = shown.rpartition("tool: ")[2].partition("\n")[0] if "tool: " in shown else ""
                    wrong = int(request.conversations[number * request.num_samples + sample]) % 2
                    texts.append(CALL % problem if not result else result + "1" * wrong)
            found = [np.array([*decoder.encode(text), 0], np.int32) for text in texts]
            total = sum(map(len, found))
            result = GenerateResult(
                tokens=np.concatenate(found),
                offsets=offsets_of([len(one) for one in found]),
                logprobs=np.full(total, -1, np.float32),
                weight_versions=np.full(total, weight_version, np.int32),
                finish_reasons=np.full(len(found), FinishReason.STOP, np.uint8),
            )
            feed.deliver(np.arange(first, first + len(found)), Responses.of(result, decoder))
            first += len(found)


def _tool_bundle(folder: Path, template: str) -> Bundle:
    """A step of episodes of two turns: a call of a tool and an answer."""
    recipe = _recipe(folder, {"name": "calculator", "calculator": {"call_reward": 0.25}})
    recipe["data"] = {"train": {"source": "environment"}}
    recipe["model"]["chat_template"] = "{% for tool in tools or [] %}{{ tool['function']['name'] }}\n{% endfor %}" + template
    recipe["rollout"] |= {"max_turns": 3, "tool_parser": "hermes"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessGenerator, "stream", _scripted)
        run = rlcore.train(recipe, progress="silent")
    return read_bundle(run.path / "bundles" / "step-000001")


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A step with a template that shows all messages as they were."""
    return _tool_bundle(tmp_path_factory.mktemp("tools"), CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def with_segments(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A step with a template that marks earlier calls, so that each turn is a segment of its own."""
    shown = "{{ '(earlier) ' if message['role'] == 'assistant' and not loop.last }}{{ message['content'] }}"
    template = CHAT_TEMPLATE.replace("{{ message['content'] }}", shown)
    assert template != CHAT_TEMPLATE
    return _tool_bundle(tmp_path_factory.mktemp("segments"), template)


def _rows(bundle: Bundle) -> dict[str, Row]:
    return {row.quantity: row for row in replay(bundle).rows}


def test_turns_with_tools_get_their_rewards_again(with_tools: Bundle) -> None:
    assert with_tools.sampled.turns is not None
    assert np.diff(with_tools.sampled.turns.offsets).tolist() == [2, 2, 2, 2]
    assert sorted(with_tools.sampled.rewards.tolist()) == [0.25, 0.25, 1.0, 1.0]
    rows = _rows(with_tools)
    names = ["prompt tokens", "reward", "reward/answer", "reward/call", "reward of a turn"]
    assert {name: rows[name].verdict for name in names} == dict.fromkeys(names, "equal")
    assert (rows["reward"].count, rows["reward of a turn"].count) == (4, 8)


def test_segments_of_an_episode_are_recorded_and_repeated(with_segments: Bundle) -> None:
    sampled = with_segments.sampled
    assert sampled.turns is not None
    assert sampled.batch.sequence_columns[EPISODE_IDS].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert np.diff(sampled.turns.offsets).tolist() == [2, 2, 2, 2]
    assert [update.num_loss_sequences for update in with_segments.updates] == [4]
    rows = _rows(with_segments)
    names = ["prompt tokens", "reward", "reward/answer", "reward/call", "reward of a turn"]
    assert {name: rows[name].verdict for name in names} == dict.fromkeys(names, "equal")
    assert (rows["reward"].count, rows["reward of a turn"].count) == (8, 8)


def test_another_result_of_a_tool_is_named_with_its_token(with_tools: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = calculator.evaluate
    monkeypatch.setattr(calculator, "evaluate", lambda expression, *rest: evaluate(f"1+({expression})", *rest))
    first = first_difference(replay(with_tools).rows)
    assert first is not None
    assert first.quantity == "prompt tokens"
    assert first.where.startswith("sample 0, token ")


def test_another_reward_of_a_turn_is_found_where_the_sum_stays(with_tools: Bundle) -> None:
    turns = with_tools.sampled.turns
    assert turns is not None
    moved = turns.rewards + np.tile(np.array([0.125, -0.125], np.float32), 4)
    wrong = evolve(with_tools, sampled=evolve(with_tools.sampled, turns=evolve(turns, rewards=moved)))
    first = first_difference(replay(wrong).rows)
    assert first is not None
    assert first.quantity == "reward of a turn"
    assert first.where.startswith("sample 0, turn 1:")


@pytest.fixture(scope="module")
def of_agents(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A step of episodes that agents run, with two requests each."""
    pytest.importorskip("openai")
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agent.py").write_text(AGENT)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in ("a", "b")))
    recipe = _recipe(folder, {"name": "agent", "agent": {"function": f"{folder / 'agent.py'}:run"}})
    recipe["data"] = {"train": {"source": "jsonl", "path": str(folder / "rows.jsonl")}}
    run = rlcore.train(recipe, progress="silent")
    return read_bundle(run.path / "bundles" / "step-000001")


def test_agents_get_their_recorded_answers(of_agents: Bundle) -> None:
    rows = _rows(of_agents)
    assert (rows["prompt tokens"].verdict, rows["reward"].verdict) == ("equal", "equal")
    assert rows["reward"].count == of_agents.sampled.batch.num_sequences
    assert len(set(of_agents.sampled.rewards.tolist())) > 1


def _agent_that(change: Callable[[str], str], bundle: Bundle) -> Row | None:
    """The first difference where the agent's source is changed."""
    import tomli

    file = Path(tomli.loads(bundle.recipe)["environment"]["agent"]["function"].rpartition(":")[0])
    before = file.read_text()
    file.write_text(change(before))
    try:
        return first_difference(replay(bundle).rows)
    finally:
        file.write_text(before)


def test_an_agent_that_rewards_otherwise_is_found(of_agents: Bundle) -> None:
    first = _agent_that(lambda source: source.replace("float(len(set(", "2 * float(len(set("), of_agents)
    assert first is not None
    assert first.quantity == "reward"


def test_an_agent_that_asks_otherwise_is_found(of_agents: Bundle) -> None:
    first = _agent_that(lambda source: source.replace('"more"', '"again"'), of_agents)
    assert first is not None
    assert first.quantity == "prompt tokens"
    first = _agent_that(lambda source: source.replace("range(2)", "range(3)"), of_agents)
    assert first is not None
    assert first.quantity == "prompt tokens"


@pytest.mark.parametrize("with_parts", [False, True])
def test_the_parts_of_a_turn_are_one_recorded_answer(with_parts: bool) -> None:
    """Two episodes: turns of 2 and 3 tokens, and one of 2; the prompt has one, and one is read between."""
    turn_of = np.array([-1, 0, 1, -1, 2, 2, 3, -1, 0, 1] if with_parts else [-1, 0, 0, -1, 1, 1, 1, -1, 0, 0], np.int32)
    counts, continues = ([4, 2], [False, True, False, True, False, True]) if with_parts else ([2, 1], None)
    versions = np.where(turn_of >= 0, 0, -1).astype(np.int32)
    batch = TokenBatch(
        tokens=np.arange(10, dtype=np.int32),
        offsets=np.array([0, 7, 10]),
        loss_mask=turn_of >= 0,
        token_columns={GENERATION_LOGPROBS: np.zeros(10, np.float32), WEIGHT_VERSIONS: versions},
        sequence_columns={GROUP_IDS: np.zeros(2, np.int32)},
    )
    turns = TurnRewards(
        rewards=np.zeros(sum(counts), np.float32),
        offsets=offsets_of(counts),
        turn_of=turn_of,
        continues=None if continues is None else np.array(continues),
    )
    sampled: Any = SimpleNamespace(
        batch=batch, turns=turns, episode_of=np.arange(2), finish_reasons=np.full(2, FinishReason.STOP, np.uint8)
    )
    found = [[(one.prompt.tolist(), one.tokens.tolist()) for one in answers.left] for answers in answers_of(sampled, 2)]
    assert found == [[([0], [1, 2]), ([0, 1, 2, 3], [4, 5, 6])], [([7], [8, 9])]]
