"""Supervised fine-tuning on whole chats: what the loss counts, checked by transformers on the template's own text."""

import contextlib
import json
import math
from pathlib import Path

import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore_torchkit.testing.models import make_model

from .system_support import Workplace, expect_failure, read_metrics, write_jsonl  # type: ignore[import-not-found]

RECIPE = """
[run]
name = "chats"
num_steps = 1
[model]
path = "model"
[algorithm]
name = "sft"
[data.train]
source = "jsonl"
path = "chats.jsonl"
[rollout]
max_prompt_tokens = 64
max_response_tokens = 192
[training]
prompts_per_step = 3
[checkpoint]
at_end = false
[sinks]
names = []
"""


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHATS = [
    [turn("user", "2+2?"), turn("assistant", "4"), turn("user", "3+3?"), turn("assistant", "6, I think")],
    [turn("system", "Add."), turn("user", "1+1?"), turn("assistant", "2")],
    [turn("user", "Hi"), turn("assistant", "Hello"), turn("user", "and?"), turn("assistant", "no more"), turn("user", "oh")],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    make_model(folder / "model", "qwen2")
    write_jsonl(folder / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    pandas.DataFrame({"conversation": CHATS}).to_parquet(folder / "chats.parquet")
    (folder / "chats.toml").write_text(RECIPE)
    return folder


def expected_loss(model: Path) -> float:
    """Nats per token of the assistant's texts and the ends behind them, each after all that is written before it."""
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, number = 0.0, 0
    for chat in CHATS:
        ids: list[int] = []
        while chat[-1]["role"] != "assistant":
            chat = chat[:-1]
        for message in chat:
            if message["role"] == "assistant":
                read = tokenizer("assistant: ")["input_ids"]
                said = [*tokenizer(message["content"])["input_ids"], tokenizer.eos_token_id]
                tokens = torch.tensor([[*ids, *read, *said]])
                with torch.no_grad():
                    logprobs = policy(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
                total, number = total - float(logprobs[-len(said) :].sum()), number + len(said)
                ids += [*read, *said, *tokenizer("\n")["input_ids"]]
            else:
                ids += tokenizer(f"{message['role']}: {message['content']}\n")["input_ids"]
    return total / number


@pytest.mark.wide(keep=["fsdp2"])
@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_the_loss_counts_what_the_assistant_said(folder: Path, trainer: str) -> None:
    with contextlib.chdir(folder):
        run = Workplace(folder).train("chats.toml", f"trainer.name={trainer}", f"run.name={trainer}")
    (record,) = read_metrics(run)
    assert record["loss"] == pytest.approx(expected_loss(folder / "model"), rel=1e-5)


def test_a_table_of_chats_is_the_same(folder: Path) -> None:
    options = ("data.train.source=parquet", "data.train.path=chats.parquet", "data.train.messages_field=conversation")
    with contextlib.chdir(folder):
        run = Workplace(folder).train("chats.toml", *options, "run.name=table")
    assert read_metrics(run)[0]["loss"] == pytest.approx(expected_loss(folder / "model"), rel=1e-5)


def test_chats_that_cannot_be_learned_are_told_at_once(folder: Path) -> None:
    write_jsonl(folder / "wrong.jsonl", [{"messages": CHATS[0]}, {"messages": CHATS[0][:1]}, {"messages": "Hi"}])
    with contextlib.chdir(folder):
        result = Workplace(folder).rlcore("check", "chats.toml", "data.train.path=wrong.jsonl")
    expect_failure(result, 4, "2 of 3 rows", "line 2 of the file", "line 3 of the file", "the assistant's")


def test_held_out_chats_have_a_loss(folder: Path) -> None:
    """Before the first step and after the last, with no environment and nothing generated."""
    options = ("data.evaluation.source=jsonl", "data.evaluation.path=chats.jsonl", "run.num_steps=2", "run.name=measured")
    with contextlib.chdir(folder):
        run = Workplace(folder).train("chats.toml", *options)
        records = read_metrics(run)
        assert [record["step"] for record in records] == [0, 1, 2]
        expected = expected_loss(folder / "model")
        assert records[0]["eval/loss"] == pytest.approx(expected, rel=1e-5)
        assert records[0]["eval/perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
        assert records[2]["eval/loss"] < records[1]["loss"]
        assert "eval/loss" not in records[1]
        assert json.loads((run / "summary.json").read_text())["held_out_loss_after"] == records[2]["eval/loss"]


def test_a_model_and_its_checkpoint_are_measured_without_a_run(folder: Path) -> None:
    options = ("data.evaluation.source=jsonl", "data.evaluation.path=chats.jsonl", "run.name=kept", "checkpoint.at_end=true")
    with contextlib.chdir(folder):
        place = Workplace(folder)
        run = place.train("chats.toml", *options)
        before, after = (
            {name: value for name, value in record.items() if name.startswith("eval/")} for record in read_metrics(run)
        )
        assert json.loads(place.rlcore("eval", "chats.toml", *options, "--json").output) == before
        checkpoint = ("--checkpoint", run / "checkpoints" / "step-000001")
        assert json.loads(place.rlcore("eval", "chats.toml", *options, *checkpoint, "--json").output) == after
        assert after["eval/loss"] < before["eval/loss"]
        expect_failure(place.rlcore("eval", "chats.toml"), 2, "nothing that measures it")


def test_chats_that_are_learned_and_measured_are_told(folder: Path) -> None:
    options = ("data.evaluation.source=jsonl", "data.evaluation.path=chats.jsonl", "data.on_overlap=error")
    with contextlib.chdir(folder):
        result = Workplace(folder).rlcore("check", "chats.toml", *options)
    expect_failure(result, 4, "3 of 3 held-out prompts are in data.train too")
