"""The ledger of failures: what is added up of failures.jsonl, and what `rlcore failures` prints."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlcore.spi import CheckpointError
from rlcore_report.data import report_data
from rlcore_report.failures import FailureLedger, read_ledger
from rlcore_report.failures_command import failures_command, lines_of

from .made_runs import entry, make_run


def ledger(folder: Path, *steps: list[dict[str, Any]], rest: str = "") -> FailureLedger:
    lines = [json.dumps({"step": number, "entries": entries}) for number, entries in enumerate(steps, start=1)]
    (folder / "failures.jsonl").write_text("".join(f"{line}\n" for line in lines) + rest)
    found = read_ledger(folder)
    assert found is not None
    return found


STEPS = [
    [
        entry("policy", "trained", "", episodes=6, reward=3.0, loss_tokens=60, weight=3.0),
        entry("limit", "trained", "cut off", episodes=2, reward=1.0, loss_tokens=20, weight=1.0, rows={"row 4": 2}),
        entry("grader", "masked", "too late", episodes=2, weight=0.0, rows={"row 9": 2}),
    ],
    [
        entry("policy", "trained", "", episodes=9, reward=0.0, loss_tokens=90, weight=4.0),
        entry("infrastructure", "dropped", "no disk", episodes=1, rows={"row 2": 1}),
        entry("grader", "masked", "too late", episodes=1, weight=0.0, rows={"row 9": 1}),
    ],
    [entry("policy", "trained", "", episodes=10, reward=10.0, loss_tokens=90, weight=0.0)],
]


def test_counts_rewards_and_shares_are_those_of_all_steps(tmp_path: Path) -> None:
    found = ledger(tmp_path, *STEPS)
    assert list(found.kinds) == ["policy", "grader", "infrastructure", "limit"]
    policy, grader, limit = found.kinds["policy"], found.kinds["grader"], found.kinds["limit"]
    assert (policy.episodes, policy.of_outcome["trained"], policy.mean_reward) == (25, 25, 13 / 25)
    assert policy.share == pytest.approx((3 / 4 + 4 / 4) / 2)
    assert limit.share == pytest.approx((1 / 4 + 0) / 2)
    assert (grader.of_outcome["masked"], grader.share, grader.mean_reward) == (3, 0.0, None)
    assert found.kinds["infrastructure"].share is None
    assert found.mean_reward == pytest.approx(14 / 27)
    assert found.mean_reward_as_zero == pytest.approx(14 / 30)
    late = found.reasons["grader", "masked", "too late"]
    assert (late.episodes, late.steps, dict(late.rows)) == (3, {1, 2}, {"row 9": 3})


def test_evaluations_are_counted_apart(tmp_path: Path) -> None:
    measured = [
        entry("policy", "evaluated", "", episodes=3, reward=2.0),
        entry("grader", "evaluated", "too late", episodes=1, rows={"row 1": 1}),
    ]
    found = ledger(tmp_path, measured, *STEPS, measured)
    assert found.num_steps == 3
    assert found.mean_reward == pytest.approx(14 / 27)
    assert found.evaluations is not None
    assert found.evaluations.kinds["policy"].mean_reward == pytest.approx(2 / 3)
    assert found.evaluations.as_json()["kinds"]["grader"]["evaluated"] == 2
    assert list(lines_of(found, "runs/a"))[-9:] == [
        "",
        "2 evaluations, 8 episodes; one that failed counts as unsolved",
        "        episodes  mean reward",
        "policy         6        0.667",
        "grader         2        0.000",
        "",
        "grader, evaluated: 2 x too late",
        "  steps 1, 5",
        "  row 1 x 2",
    ]


def test_an_algorithm_without_advantages_has_no_shares(tmp_path: Path) -> None:
    found = ledger(tmp_path, [entry("policy", "trained", "", episodes=3, reward=3.0)])
    assert found.kinds["policy"].share is None
    assert found.kinds["policy"].as_json()["advantage_share"] is None


def test_what_is_printed(tmp_path: Path) -> None:
    assert list(lines_of(ledger(tmp_path, *STEPS), "runs/a")) == [
        "runs/a: 3 steps, 31 episodes",
        "                episodes  trained  masked  asked again  dropped  mean reward  |advantage|",
        "policy                25       25       0            0        0        0.520       87.5 %",
        "grader                 3        0       3            0        0            -        0.0 %",
        "infrastructure         1        0       0            0        1            -            -",
        "limit                  2        2       0            0        0        0.500       12.5 %",
        "|advantage| is the mean over steps of the episodes' share of sum |advantage| over the step's loss tokens.",
        "Masked episodes are in no loss and in no group's mean. As rewards of 0 they would have moved the mean reward "
        "from 0.519 to 0.467.",
        "",
        "grader, masked: 3 x too late",
        "  steps 1-2",
        "  row 9 x 3",
        "",
        "infrastructure, dropped: 1 x no disk",
        "  steps 2",
        "  row 2 x 1",
        "",
        "limit, trained: 2 x cut off",
        "  steps 1",
        "  row 4 x 2",
    ]


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    assert ledger(tmp_path, STEPS[0], rest='{"step": 2, "entr').num_steps == 1


def test_a_damaged_file_is_refused_with_all_lines_that_are_wrong(tmp_path: Path) -> None:
    bad = [{**entry("weather", "trained", ""), "episodes": "three"}]
    with pytest.raises(CheckpointError) as raised:
        ledger(tmp_path, STEPS[0], bad, rest='not JSON\n{"step": 4}\n')
    text = str(raised.value)
    assert all(word in text for word in ("failures.jsonl", "line 2", "weather", "three", "line 3", "line 4"))


def test_the_command_prints_the_table_or_json(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 12)
    printed = CliRunner().invoke(failures_command, [str(run)], catch_exceptions=False)
    assert printed.exit_code == 0
    assert f"{run}: 12 steps, 204 episodes" in printed.output
    told = json.loads(CliRunner().invoke(failures_command, [str(run), "--json"], catch_exceptions=False).output)
    assert told["kinds"]["grader"]["masked"] == 36
    assert told["kinds"]["policy"]["advantage_share"] == pytest.approx(0.75)
    assert told["reasons"][0]["rows"]["row 3"] == 24


def test_a_run_without_samples_of_its_policy_is_told_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    (run / "failures.jsonl").unlink()
    with pytest.raises(CheckpointError, match="rlcore-rollout"):
        CliRunner().invoke(failures_command, [str(run)], catch_exceptions=False)


def test_the_page_has_the_table(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "one", 3), make_run(tmp_path / "two", 3)
    (other / "failures.jsonl").unlink()
    first, second = report_data([one, other])["runs"]
    assert first["failures"]["kinds"]["tool"]["asked_again"] == 3
    assert [reason["kind"] for reason in first["failures"]["reasons"]] == ["grader", "tool", "limit"]
    assert second["failures"] is None
