"""What a run reads before its first step: rows within the limits, and what is odd about them."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.config.model import ModelConfig
from rlcore.run.data.mixes import chunks_of, rows_at
from rlcore.run.data.text import renderer, tokenizers
from rlcore.run.plan.inputs import Inputs, load_inputs
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import DataError, PluginError, Row
from rlcore.testing.fakes import FakeTokenizer
from rlcore_text.tokenizers.tokenizer import load_tokenizer
from rlcore_torchkit.testing.models import make_tokenizer

Run = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((), "3 of 4"),
        (("evaluation.max_prompts=2",), "1 of 2"),
        (
            ("rollout.max_prompt_tokens=3", *(f"data.{split}.on_long_prompt=drop" for split in ("train", "evaluation"))),
            "1 of 2",
        ),
    ],
)
def test_only_rows_that_are_used_are_held_out_or_trained_on(
    prepared: Callable[..., RunPlan], tmp_path: Path, overrides: tuple[str, ...], found: str
) -> None:
    sources = []
    for split, prompts in {"train": ["a:", "b:", "long:"], "evaluation": ["a:", "c:", "long:", "long:"]}.items():
        path = tmp_path / f"{split}.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        sources += [f"data.{split}.source=jsonl", f"data.{split}.path={path}"]
    with load_inputs(prepared(*sources, *overrides), FakeTokenizer()) as inputs:
        assert inputs.notes == (
            f"data.evaluation: {found} held-out prompts are in data.train too, so that evaluations measure what was trained on",
        )


def test_fields_that_only_the_environment_reads_are_told_once(prepared: Callable[..., RunPlan], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a:", "system": ""}, *({"prompt": f"{name}:", "system": "s", "documents": None} for name in "bc")]
    rows += [{"prompt": "d:", "tools": [{"name": "f"}]}]  # which the environment does not show
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with load_inputs(prepared("data.train.source=jsonl", f"data.train.path={path}"), FakeTokenizer()) as inputs:
        assert [note.partition(": the")[0] for note in inputs.notes] == [
            f"data.train: rows have a field {name!r}" for name in ("system", "tools")
        ]


@pytest.mark.parametrize(("tokenizer", "role"), [(FakeTokenizer(), "renderer"), (None, "tokenizer")])
def test_a_run_without_what_reads_its_text_says_what_installs_it(
    prepared: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch, tokenizer: FakeTokenizer | None, role: str
) -> None:
    plan = prepared()
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "rlcore-text")
    for found in (renderer, tokenizers):
        found.cache_clear()
    with (
        pytest.raises(PluginError, match=rf"{role}.*pip install 'rlcore\[tokenizer\]'"),
        load_inputs(plan, tokenizer),
    ):
        pass


def test_rows_that_are_measured_alone_may_stand_in_for_those_to_train_on(prepared: Callable[..., RunPlan]) -> None:
    rows = [{"prompt": "a:"}, {"prompt": "b:"}]
    plan = prepared("data.train.source=python", "data.evaluation.source=python", "data.on_overlap=error")
    plan = evolve(plan, given_rows={"train": rows, "evaluation": rows})
    with load_inputs(evolve(plan, evaluating=True), FakeTokenizer()) as inputs:
        assert inputs.notes == ()
    with pytest.raises(DataError, match="2 of 2 held-out"), load_inputs(plan, FakeTokenizer()):
        pass


class LateRows(list[Row]):
    """Rows that are there, and never come."""

    def __iter__(self) -> Iterator[Row]:
        time.sleep(60)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        time.sleep(60)
        return super().__getitem__(index)


READS: dict[str, Callable[[Inputs], object]] = {
    "digest of rows that are read": lambda inputs: inputs.train_digests(),
    "digest of an environment's rows": lambda inputs: evolve(
        inputs, train_sets=[evolve(one, config=evolve(one.config, source="environment")) for one in inputs.train_sets]
    ).train_digests(),
    "rows of a step": lambda inputs: rows_at(inputs.train_sets[0].rows, np.arange(1), "data.train"),
    "rows in chunks": lambda inputs: list(chunks_of(inputs.train_sets[0].rows, "data.train")),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_rows_that_do_not_come_are_named(
    prepared: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch, read: Callable[[Inputs], object]
) -> None:
    plan = evolve(prepared("data.train.source=python"), given_rows={"train": [{"prompt": "a:"}]})
    with load_inputs(plan, FakeTokenizer()) as inputs:
        late = evolve(inputs, train_sets=[evolve(one, rows=LateRows(one.rows)) for one in inputs.train_sets])
        monkeypatch.setattr("rlcore.time_limit.load_seconds", lambda: 0.005)
        with pytest.raises(PluginError, match=r"rows .*data\.train.* 0\.05 s"):
            read(late)


def test_prompts_that_json_cannot_hold_do_not_overlap(prepared: Callable[..., RunPlan]) -> None:
    plan = prepared("data.train.source=environment", "data.evaluation.source=environment", "data.on_overlap=error")
    rows: list[Row] = [{"prompt": {1: "a", "b": 2}}, {"prompt": "a:"}]  # keys that cannot be sorted
    plan.environment.rows = lambda split: rows  # type: ignore[union-attr, method-assign, assignment]
    with pytest.raises(DataError, match="1 of 2 held-out"), load_inputs(plan, FakeTokenizer()):
        pass


@pytest.mark.parametrize(("prompts_per_step", "is_noted"), [(2, False), (3, True)])
def test_a_step_of_more_prompts_than_the_first_level_has_is_noted(
    prepared: Callable[..., RunPlan], prompts_per_step: int, is_noted: bool
) -> None:
    rows = [{"prompt": f"{letter}:", "level": level} for letter, level in zip("abcd", (0, 0, 1, 1), strict=True)]
    options = ("data.train.source=python", "data.curriculum_threshold=0.5", f"training.prompts_per_step={prompts_per_step}")
    with load_inputs(evolve(prepared(*options), given_rows={"train": rows}), FakeTokenizer()) as inputs:
        noted = [note for note in inputs.notes if note.startswith("data.curriculum_threshold: 2 rows are open at first, of 4")]
        assert bool(noted) == is_noted


def test_a_tokenizer_from_the_hub_says_which_tokens_its_model_has(prepared: Callable[..., RunPlan], tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    plan = prepared("model.path=acme/tiny", "data.train.limit=2", "data.evaluation.limit=2")
    with load_inputs(plan, evolve(tokenizer, vocab_size=500)):
        assert plan.algorithm.vocab_size == 500


def test_prompts_of_tokens_that_the_model_has_no_rows_for_are_refused(prepared: Callable[..., RunPlan], tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    plan = prepared("model.path=acme/tiny", "data.train.limit=2", "data.evaluation.limit=2")
    with pytest.raises(DataError, match="expected tokens below 3"), load_inputs(plan, evolve(tokenizer, vocab_size=3)):
        pass


def test_prompts_over_the_limit_are_named(run: Run) -> None:
    with pytest.raises(DataError, match="rollout.max_prompt_tokens"):
        run("rollout.max_prompt_tokens=3")
