"""What `rlcore check` says of the data: rows, the first prompt as the model sees it, and what it did not look at."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve
from data_support import require_source

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import DataError, capabilities
from rlcore.testing.fakes import FakeTokenizer, fake_registry
from rlcore.testing.fakes.providers import FAKE_ENVIRONMENT
from rlcore_doctor.preview import preview

from ..core.run.conftest import prepared as prepared  # type: ignore[import-not-found]

Prepare = Callable[..., RunPlan]


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "completion": "b"}) + "\n" for text in ("long prompt:", "a:", "b:")))
    return path


def of(path: Path) -> tuple[str, ...]:
    return ("data.train.source=jsonl", f"data.train.path={path}")


def test_rows_and_first_prompt_are_those_of_the_run(prepared: Prepare) -> None:
    plan = prepared("data.train.shuffle=false")
    found = preview(plan, FakeTokenizer())
    assert found.rows == {"train": "64 rows of the environment", "evaluation": "16 rows of the environment"}
    assert plan.environment is not None
    rows = plan.environment.rows("train")
    assert rows is not None
    assert found.first_prompt == rows[0]["prompt"]
    assert not found.notes


def test_rows_over_the_limit_are_counted_and_no_first_prompt(prepared: Prepare, train_file: Path) -> None:
    limit = ("rollout.max_prompt_tokens=3", "data.train.on_long_prompt=drop", "data.evaluation.on_long_prompt=drop")
    found = preview(prepared(*of(train_file), *limit, "environment.fake.prompt_length=0"), FakeTokenizer())
    assert found.rows["train"] == f"3 rows of {train_file}, of which 1 are over the limits and left out"
    assert found.first_prompt == "a:"


def test_demonstrations_show_their_prompt_and_the_completion_to_learn(prepared: Prepare, train_file: Path) -> None:
    found = preview(prepared(*of(train_file), "algorithm.fake.source=demonstrations"), FakeTokenizer())
    assert found.first_prompt == "long prompt:"
    assert list(found.target) == ["to learn"]
    assert found.target["to learn"].startswith("b")


def test_preferences_show_both_answers(prepared: Prepare, train_file: Path) -> None:
    train_file.write_text(json.dumps({"prompt": "a:", "chosen": "b", "rejected": "c"}) + "\n")
    found = preview(prepared(*of(train_file), "algorithm.fake.source=preferences"), FakeTokenizer())
    assert {name: text[0] for name, text in found.target.items()} == {"chosen": "b", "rejected": "c"}


def test_rewards_show_the_fields_that_the_environment_gets(prepared: Prepare, train_file: Path) -> None:
    train_file.write_text(json.dumps({"prompt": "a:", "answer": "b", "long": "c" * 1000}) + "\n")
    found = preview(prepared(*of(train_file)), FakeTokenizer())
    assert found.target["answer"] == "'b'"
    assert len(found.target["long"]) < 300


def test_formats_of_several_data_sets_are_named(prepared: Prepare, train_file: Path) -> None:
    mixed = [
        f"data.train.mix.{name}.{key}={value}"
        for name in ("one", "two")
        for key, value in (("source", "jsonl"), ("path", train_file))
    ]
    found = preview(prepared(*mixed, "data.train.mix.one.format=trl"), FakeTokenizer())
    assert found.rows["train"].endswith(", one in the format trl")


def test_an_environment_that_promises_nothing_is_not_asked_for_a_prompt(prepared: Prepare) -> None:
    dear = evolve(FAKE_ENVIRONMENT, capabilities=FAKE_ENVIRONMENT.capabilities - {capabilities.CHEAP_RESET})
    others = tuple(entry for entry in fake_registry().entries if entry.role != "environment")
    entries = (*others, *Registry.from_providers({"environment": [dear]}).of("environment"))
    found = preview(prepared(registry=evolve(fake_registry(), entries=entries)), FakeTokenizer())
    assert found.first_prompt is None
    assert len(found.rows) == 2


def test_what_is_on_the_hub_is_not_fetched_and_a_note_says_so(prepared: Prepare) -> None:
    require_source("huggingface")
    remote = ("data.train.source=huggingface", "data.train.path=someone/rows", "model.path=someone/model")
    found = preview(prepared(*remote))
    assert found.rows == {"evaluation": "16 rows of the environment"}
    assert found.first_prompt is None
    assert [note.partition(":")[0] for note in found.notes] == ["data.train", "model.path"]


def test_bad_data_are_the_error_that_the_run_would_raise(prepared: Prepare, train_file: Path) -> None:
    train_file.write_text("{\n")
    with pytest.raises(DataError, match=r"data\.train\.path"):
        preview(prepared(*of(train_file)), FakeTokenizer())
