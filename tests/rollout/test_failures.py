"""failures.jsonl: what a step's entries count, and what a run writes of the episodes of its steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen

from rlcore.registry.discovery import Registry
from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import (
    ADVANTAGES,
    EPISODE_IDS,
    GROUP_IDS,
    EpisodeFailure,
    ResetResult,
    Row,
    StepResult,
    TokenBatch,
    Turn,
    capabilities,
)
from rlcore.spi.arrays import offsets_of
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore.testing.fakes.providers import FAKE_ENVIRONMENT
from rlcore_rollout.failures import MAX_ENTRIES, MAX_ROWS, OTHERS, LeftOut, StepEndings, step_entries

from .test_asynchrony import SLOW, CountsSteps, Slow, ahead  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
DISK = EpisodeFailure(kind="infrastructure", reason="no disk")
CUT = EpisodeFailure(kind="limit", reason="cut off")


def collected(lengths: list[int], episodes: list[int], failures: list[EpisodeFailure | None]) -> CollectedRollouts:
    """Sequences of so many tokens, the first of each read; two episodes a group, whose reward is their number plus 1."""
    number = len(lengths)
    valid = np.array([failures[one] is None or failures[one].kind == "limit" for one in episodes], np.bool_)  # type: ignore[union-attr]
    offsets = offsets_of(lengths)
    mask = np.ones(sum(lengths), np.bool_)
    mask[offsets[:-1]] = False
    return CollectedRollouts(
        batch=TokenBatch(
            tokens=np.zeros(sum(lengths), np.int32),
            offsets=offsets,
            loss_mask=mask & np.repeat(valid, lengths),
            sequence_columns={
                GROUP_IDS: np.array(episodes, np.int32) // 2,
                EPISODE_IDS: np.array(episodes, np.int32),
            },
        ),
        rewards=np.where(valid, np.array(episodes) + 1, 0).astype(np.float32),
        valid=valid,
        finish_reasons=np.zeros(number, np.uint8),
        success=valid,
        responses=[""] * number,
        num_generated=np.array(lengths) - 1,
        failed=~valid,
        timed_out=np.zeros(number, np.bool_),
        truncated=np.zeros(number, np.bool_),
        failures=failures,
    )


def trained(samples: CollectedRollouts, advantages: list[float]) -> TokenBatch:
    """The batch of a step; one advantage a sequence."""
    column = np.repeat(np.array(advantages, np.float32), samples.batch.lengths)
    return samples.batch.with_token_column(ADVANTAGES, np.where(samples.batch.loss_mask, column, np.float32(0)))


def test_an_entry_has_the_sums_of_its_episodes_over_all_their_sequences() -> None:
    samples = collected([3, 5, 4, 2, 6], [0, 0, 1, 2, 3], [None, CUT, DISK, None])
    batch = trained(samples, [1.5, 1.5, -2.0, 9.0, 0.25])
    found = step_entries(samples, batch, StepEndings(rows=["row 7", "row 9"]))
    by_kind = {one.kind: one for one in found}
    policy, limit, disk = by_kind["policy"], by_kind["limit"], by_kind["infrastructure"]
    assert (policy.episodes, policy.reward, policy.generated, policy.loss_tokens) == (2, 5.0, 11, 11)
    assert policy.weight == pytest.approx(1.5 * 2 + 1.5 * 4 + 0.25 * 5)
    assert policy.rows == {}
    assert (limit.outcome, limit.reason, limit.reward, limit.loss_tokens, limit.rows) == (
        "trained",
        "cut off",
        2.0,
        3,
        {"row 7": 1},
    )
    assert limit.weight == pytest.approx(2.0 * 3)
    assert (disk.outcome, disk.reward, disk.generated, disk.loss_tokens, disk.weight) == ("masked", 0.0, 1, 0, 0.0)
    assert disk.rows == {"row 9": 1}


def test_the_weights_are_the_sum_of_magnitudes_of_advantages_over_loss_tokens() -> None:
    random = np.random.default_rng(3)
    lengths = random.integers(2, 9, 40).tolist()
    samples = collected(lengths, list(range(40)), [DISK if number % 7 == 3 else None for number in range(40)])
    batch = trained(samples, random.normal(0, 2, 40).tolist())
    found = step_entries(samples, batch, StepEndings())
    weights = np.abs(batch.token_columns[ADVANTAGES].astype(np.float64))[batch.loss_mask]
    assert sum(one.weight or 0.0 for one in found) == pytest.approx(weights.sum(), rel=1e-12)
    assert sum(one.episodes for one in found) == 40


def test_without_advantages_or_with_other_sequences_the_weights_are_unknown() -> None:
    samples = collected([3, 4], [0, 1], [None, CUT])
    assert [one.weight for one in step_entries(samples, samples.batch, StepEndings())] == [None, None]
    fewer = trained(samples, [1.0, 1.0]).select(np.array([1]))
    assert [one.weight for one in step_entries(samples, fewer, StepEndings())] == [None, None]
    assert [one.loss_tokens for one in step_entries(samples, fewer, StepEndings())] == [2, 3]


def test_episodes_that_were_left_out_have_entries_of_their_own() -> None:
    samples = collected([3, 4], [0, 1], [None, None])
    left_out = [
        ("row 3", LeftOut(outcome="asked again", row=3, endings={DISK: 1, None: 1})),
        ("row 4", LeftOut(outcome="dropped", row=4, endings={DISK: 1})),
    ]
    found = step_entries(samples, samples.batch, StepEndings(left_out=left_out))
    counts = {(one.kind, one.outcome): (one.episodes, one.rows) for one in found}
    assert counts == {
        ("policy", "trained"): (2, {}),
        ("infrastructure", "asked again"): (1, {"row 3": 1}),
        ("policy", "asked again"): (1, {}),
        ("infrastructure", "dropped"): (1, {"row 4": 1}),
    }


def test_a_step_has_its_most_frequent_entries_and_rows_and_counts_the_others() -> None:
    number = 4 * MAX_ENTRIES
    failures: list[EpisodeFailure | None] = [EpisodeFailure(kind="tool", reason=f"reason {one // 2}") for one in range(number)]
    failures[: 3 * MAX_ROWS] = [DISK] * 3 * MAX_ROWS
    samples = collected([2] * number, list(range(number)), failures)
    rows = [f"row {one}" for one in range(number // 2)]
    found = step_entries(samples, samples.batch, StepEndings(rows=rows))
    assert len(found) == MAX_ENTRIES + 1
    assert sum(one.episodes for one in found) == number
    assert (found[0].reason, len(found[0].rows)) == ("no disk", MAX_ROWS)
    assert found[-1].reason == OTHERS


# Runs


@frozen(kw_only=True)
class FlakyConfig(FakeEnvironmentConfig):
    """`[environment.fake]`"""

    lost: str = ""
    """Answers that begin with one of these letters lose their tool."""


class Flaky(FakeEnvironment):
    """Returns failures."""

    config: FlakyConfig

    async def reset(self, row: Row, seed: int) -> ResetResult:
        return await super().reset(row, seed)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        found = await super().step(state, turn)
        is_lost = turn.text[:1] in tuple(self.config.lost)
        return evolve(found, failure=EpisodeFailure(kind="tool", reason="the tool is lost")) if is_lost else found


@pytest.fixture
def flaky() -> Registry:
    capable = FAKE_ENVIRONMENT.capabilities - {capabilities.CHEAP_RESET}
    provider = evolve(FAKE_ENVIRONMENT, config=FlakyConfig, backend=f"{__name__}:Flaky", capabilities=capable)
    others = tuple(entry for entry in fake_registry().entries if entry.role != "environment")
    return evolve(fake_registry(), entries=(*others, *Registry.from_providers({"environment": [provider]}).entries))


LOST = ("environment.fake.lost=abcuvwxyz", "evaluation.at_start=false", "evaluation.every_n_steps=0", "evaluation.at_end=false")


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "runs" / "run" / "failures.jsonl").read_text().splitlines()]


def count(line: dict[str, Any], **fields: str) -> int:
    return sum(one["episodes"] for one in line["entries"] if all(one[name] == value for name, value in fields.items()))


def test_a_run_writes_a_line_a_step_that_agrees_with_its_metrics(run: Run, flaky: Registry, tmp_path: Path) -> None:
    run(*LOST, registry=flaky)
    found = lines(tmp_path)
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    failed = {record["step"]: record["environment/failed"] for record in metrics if "environment/failed" in record}
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [count(line, kind="tool", outcome="masked") for line in found] == [failed[line["step"]] for line in found]
    assert sum(failed.values()) > 0
    assert {count(line) for line in found} == {8 * 8}
    (lost,) = [one for one in found[0]["entries"] if one["kind"] == "tool"]
    assert lost["reason"] == "the tool is lost"
    assert all(row.startswith("row ") and 0 <= int(row[4:]) < 64 for row in lost["rows"])


def test_a_run_that_was_resumed_has_each_step_once(run: Run, flaky: Registry, tmp_path: Path) -> None:
    run(*LOST, registry=flaky)
    whole = lines(tmp_path)
    other = tmp_path / "other"
    run(*LOST, f"run.directory={other}", "run.num_steps=4", registry=flaky)
    run(*LOST, f"run.directory={other}", registry=flaky, resume=True, allow_changes=True)
    resumed = [json.loads(line) for line in (other / "run" / "failures.jsonl").read_text().splitlines()]
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]
    assert resumed == whole


MEASURED = ("environment.fake.lost=abcuvwxyz", "environment.fake.num_evaluation_rows=4", "evaluation.temperature=1.0")


def test_evaluations_have_lines_of_their_own_also_in_a_resumed_run(run: Run, flaky: Registry, tmp_path: Path) -> None:
    run(*MEASURED, "evaluation.every_n_steps=1", "run.num_steps=4", registry=flaky)
    whole = lines(tmp_path)
    measured = [line for line in whole if count(line, outcome="evaluated")]
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    failed = {record["step"]: record["eval/failed"] for record in metrics if "eval/failed" in record}
    assert {line["step"]: count(line, kind="tool") for line in measured} == failed
    assert sum(failed.values()) > 0
    assert all(count(line) == count(line, outcome="evaluated") for line in measured)
    named = [row for line in measured for one in line["entries"] if one["kind"] == "tool" for row in one["rows"]]
    assert set(named) <= {f"row {number}" for number in range(4)}
    assert named
    other = tmp_path / "other"
    run(*MEASURED, "evaluation.every_n_steps=1", f"run.directory={other}", "run.num_steps=2", registry=flaky)
    run(
        *MEASURED,
        "evaluation.every_n_steps=1",
        f"run.directory={other}",
        "run.num_steps=4",
        registry=flaky,
        resume=True,
        allow_changes=True,
    )
    resumed = [json.loads(line) for line in (other / "run" / "failures.jsonl").read_text().splitlines()]
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]


def test_groups_that_are_replaced_are_counted_as_asked_again(run: Run, flaky: Registry, tmp_path: Path) -> None:
    run(
        *LOST,
        "run.num_steps=3",
        "rollout.dynamic_sampling=true",
        "rollout.max_response_tokens=2",
        "rollout.samples_per_prompt=2",
        "rollout.max_refill_ratio=50",
        "rollout.max_failed_fraction=1.0",
        registry=flaky,
    )
    found = lines(tmp_path)
    assert all(count(line, outcome="trained") + count(line, outcome="masked") == 16 for line in found)
    assert sum(count(line, outcome="asked again") for line in found) > 0
    assert sum(count(line, outcome="asked again", kind="tool") for line in found) > 0


def test_groups_that_are_too_old_are_counted_as_dropped(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    """The episodes of theirs that had ended."""
    registry = registry_with(environment=Slow)
    run(*ahead(0), *SLOW, "async.on_stale=drop", "async.extra_prompts=4", registry=registry, progress=CountsSteps())
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    most = {record["step"]: 8 * record["async/groups_dropped"] for record in metrics if "async/groups_dropped" in record}
    dropped = {line["step"]: count(line, outcome="dropped") for line in lines(tmp_path)}
    assert sum(dropped.values()) > 0
    assert all(number <= most[step] for step, number in dropped.items())
