"""Receipts of runs: right ones, planted faults, cost, resumption, adapters and truncated sampling."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlcore
from rlcore.run.execution.groups import InProcessTrainer
from rlcore.spi import BoundError
from rlcore_bundles.receipts.compute import receipt
from rlcore_bundles.receipts.observer import is_drawn
from rlcore_bundles.recording import record

from .receipt_support import FAULTS, NAMED_LATER, receipts_in, uncomputed

EACH = {"every_n_steps": 1, "max_waiting": 9}
"""Options that give every step a receipt."""


def test_a_receipt_agrees_with_trainer_generator_and_refit(receipted: Path) -> None:
    found = receipts_in(receipted)
    assert sorted(found) == [1, 2, 3]
    for one in found.values():
        assert one["finding"] == ""
        assert one["trainer"]["mean"] < 1e-6
        assert one["generation"]["mean"] < 1e-6
        assert one["trainer"]["num_tokens"] == one["generation"]["num_tokens"] > 0
        assert one["tensors"]["compared"] > 10
        assert one["tensors"]["missing"] == one["tensors"]["changed"] == []
    metrics = rlcore.load(receipted).metrics
    np.testing.assert_array_equal(metrics["receipts/trainer_mean"], [one["trainer"]["mean"] for one in found.values()])
    assert not list((receipted / "receipts").glob(".step-*"))  # the copies of the model are gone


def test_a_run_has_the_same_figures_without_receipts(receipted: Path, recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    plain = rlcore.train(recipe_of(tmp_path), progress="silent")
    before, after = rlcore.load(receipted).metrics, plain.metrics
    names = [name for name in before if not name.startswith(NAMED_LATER)]
    assert len(names) > 10
    for name in names:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_the_run_pays_one_copy_and_one_forward_pass_of_a_few_sequences(
    recipe_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, sizes = Counter[str](), list[int]()
    for name in ("logprobs", "save_state"):
        right = getattr(InProcessTrainer, name)

        def counted(self: Any, *given: Any, _right: Any = right, _name: str = name) -> Any:
            calls[_name] += 1
            if _name == "logprobs":
                sizes.append(len(given[1]))
            return _right(self, *given)

        monkeypatch.setattr(InProcessTrainer, name, counted)
    uncomputed(monkeypatch, {"failure": "not computed"})
    options = recipe_of(tmp_path, logging={"bundles_every_n_steps": 0}, checkpoint={"every_n_steps": 0, "at_end": False})
    seed = next(seed for seed in range(99) if [is_drawn(seed, step, 3) for step in (1, 2, 3)] == [False, True, False])
    for receipts in ({"every_n_steps": 3, "num_sequences": 2}, {"every_n_steps": 0}):
        calls.clear()
        recipe = {**options, "receipts": receipts, "run": {**options["run"], "name": f"run-{receipts['every_n_steps']}"}}
        recipe["run"]["seed"] = seed
        recipe["training"] = {**options["training"], "minibatches_per_step": 1}
        rlcore.train(recipe, progress="silent")
        drawn = int(receipts["every_n_steps"] > 0)
        assert calls == Counter({"logprobs": drawn, "save_state": drawn})
    assert sizes == [2]


def test_steps_are_drawn_by_the_seed_at_the_mean_rate() -> None:
    drawn = [step for step in range(1, 20_001) if is_drawn(3, step, 20)]
    assert 900 < len(drawn) < 1100
    assert drawn == [step for step in range(1, 20_001) if is_drawn(3, step, 20)]
    assert drawn != [step for step in range(1, 20_001) if is_drawn(4, step, 20)]
    gaps = np.diff(drawn)
    assert gaps.min() == 1  # not every twentieth
    assert gaps.max() > 60
    assert not any(is_drawn(3, step, 0) for step in range(100))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(
    fault: str, recipe_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, expected = FAULTS[fault]
    plant(monkeypatch)
    recipe = recipe_of(tmp_path, run={"num_steps": 2}, logging={"bundles_every_n_steps": 0}, receipts=EACH)
    run = rlcore.train(recipe, progress="silent")
    found = receipts_in(run.path)
    assert sorted(found) == [1, 2]
    assert expected in found[2]["finding"]
    named = ("trainer's", "generator's", "refit")
    assert [word for word in named if word in found[2]["finding"]] == [word for word in named if word in expected]


def test_a_difference_may_end_the_run(recipe_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["scaled trainer"][0](monkeypatch)
    sections = {"logging": {"bundles_every_n_steps": 0}, "receipts": EACH | {"on_excess": "error"}}
    with pytest.raises(BoundError) as error:
        rlcore.train(recipe_of(tmp_path, **sections), progress="silent")
    assert "1.03 times" in str(error.value)
    assert error.value.metrics["receipts/trainer_mean"] > 1e-2
    (sections["receipts"]) |= {"max_mean_difference": 1.0}
    wide = rlcore.train(recipe_of(tmp_path, "wide", run={"num_steps": 1}, **sections), progress="silent")
    assert receipts_in(wide.path)[1]["finding"] == ""


def test_a_resumed_run_computes_what_was_left(
    recipe_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(num_steps: int, **options: Any) -> Path:
        recipe = recipe_of(tmp_path, run={"num_steps": num_steps}, logging={"bundles_every_n_steps": 0}, receipts=EACH)
        return rlcore.train(recipe, progress="silent", **options).path

    with monkeypatch.context() as patch:
        uncomputed(patch, {"failure": "killed", "stopped": True})
        path = run(2)
    receipts = path / "receipts"
    assert sorted(one.name for one in receipts.glob(".step-*")) == [".step-000001", ".step-000002"]
    assert not receipts_in(path)
    (receipts / "step-000003.json").write_text(json.dumps({"step": 3, "finding": "of a training that is forgotten"}))
    (receipts / "steps.jsonl").open("a").write(json.dumps({"step": 3, "versions": {}}) + "\n")
    (receipts / "refits.jsonl").open("a").write(json.dumps({"version": 99}) + "\n")
    run(3, resume=True)
    found = receipts_in(path)
    assert sorted(found) == [1, 2, 3]
    assert {one["finding"] for one in found.values()} == {""}
    assert [json.loads(line)["step"] for line in (receipts / "steps.jsonl").read_text().splitlines()] == [1, 2, 3]
    refits = [json.loads(line) for line in (receipts / "refits.jsonl").read_text().splitlines()]
    assert sorted({one["version"] for one in refits}) == [0, 2, 4, 6]
    of_resumption = [one for one in refits if one["version"] == 4]
    assert len(of_resumption) > 1
    assert len({one["sha256"] for one in of_resumption}) == 1  # the resumed run sends the same weights
    assert np.isfinite(rlcore.load(path).metrics["receipts/generation_mean"]).all()


@pytest.mark.parametrize(
    "sections",
    [
        {"lora": {"rank": 4, "alpha": 8.0}, "refit": {"adapters": "merged"}},
        {"lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1}},
        {"rollout": {"top_k": 3, "temperature": 0.8}},
        {"async": {"max_staleness": 1}},
        {"model": {"dtype": "bfloat16"}},
    ],
    ids=["merged adapters", "adapters alone", "truncated sampling", "older weights", "bfloat16"],
)
def test_another_kind_of_run_has_receipts(sections: dict[str, Any], recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    options = EACH | {"num_sequences": 64}
    recipe = recipe_of(tmp_path, run={"num_steps": 2}, logging={"bundles_every_n_steps": 0}, receipts=options, **sections)
    run = rlcore.train(recipe, progress="silent")
    found = receipts_in(run.path)
    assert sorted(found) == [1, 2]
    assert {one["finding"] for one in found.values()} == {""}
    assert all(one["trainer"]["num_tokens"] > 100 for one in found.values())
    assert found[1]["generation"]["mean"] < (5e-3 if "model" in sections else 1e-5)


def test_a_step_that_is_recorded_later_has_no_receipt(receipted: Path, tmp_path: Path) -> None:
    found = record(receipted, 2, tmp_path / "bundle", weights="none")
    assert not found.differing
    assert found.num_equal > 10
    assert "[receipts]\nevery_n_steps = 0\n" in found.bundle.recipe


def test_a_job_that_cannot_be_computed_is_a_failed_receipt(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    found = receipt(None, tmp_path)
    assert found.keys() == {"failure"}
    assert "arrays.safetensors" in found["failure"]
