"""`rlcore plan`: the table, the lines below it, and the same for programs."""

import json

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore_plan.command import layout, lines_below, override_words, placement, shown
from rlcore_plan.devices import parse_devices
from rlcore_plan.layouts import Candidate
from rlcore_plan.plan import Plan

GIB = 2**30


def candidate(total: float, *, trainer: str = "tra", fits: bool = True, **sizes: object) -> Candidate:
    overrides = {"cluster.gpus_per_node": 8, **{f"trainer.{trainer}.{key}": value for key, value in sizes.items()}}
    return Candidate(
        trainer=trainer,
        generator="gen",
        overrides=tuple(overrides.items()),
        memory={"weights": 3 * GIB, "KV cache": GIB},
        trainer_bytes=3 * GIB,
        generator_bytes=GIB,
        free_bytes=(4 * GIB if fits else GIB, 4 * GIB),
        seconds={"training": total},
        total=total,
        assumptions=("Tra is quick.",),
    )


@pytest.fixture
def plan() -> Plan:
    made = [candidate(float(number), tensor_parallel=2, recompute="full") for number in range(1, 15)]
    made += [candidate(20.0, trainer="other"), candidate(30.0, fits=False)]
    return Plan(devices=parse_devices("8xH100", None), candidates=tuple(made), assumptions=("Answers are short.",))


def test_the_fastest_ten_and_each_kind_are_shown(plan: Plan) -> None:
    assert [one.total for one in shown(plan, everything=False)] == [*range(1, 11), 20.0]
    assert len(shown(plan, everything=True)) == 15


def test_a_layout_is_told_by_its_sizes(plan: Plan) -> None:
    best = plan.fitting[0]
    assert layout(best, "trainer", "tra") == "tra TP2 recompute"
    assert placement(best) == "colocated"
    assert override_words(best) == ["cluster.gpus_per_node=8", "trainer.tra.tensor_parallel=2", "trainer.tra.recompute=full"]


def test_what_is_assumed_and_the_overrides_stand_below(plan: Plan) -> None:
    lines = list(lines_below(plan))
    assert "  Answers are short." in lines
    assert "  Tra is quick." in lines
    assert lines[-1].strip().endswith("trainer.tra.recompute=full")


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_command_prints_the_plan(monkeypatch: pytest.MonkeyPatch, plan: Plan, arguments: list[str]) -> None:
    monkeypatch.setattr("rlcore_plan.plan.plan_recipe", lambda *_, **__: plan)
    result = CliRunner().invoke(cli, ["plan", "recipe.toml", "--gpus", "8xH100", *arguments])
    assert result.exit_code == 0, result.output
    if arguments:
        told = json.loads(result.output)
        assert told["layouts"][0]["memory_bytes"] == {"weights": 3 * GIB, "KV cache": GIB}
        assert told["layouts"][0]["overrides"]["trainer.tra.tensor_parallel"] == 2
        assert told["devices"] == {"kind": "H100", "nodes": 1, "per_node": 8}
    else:
        assert "15 of 16 layouts fit" in result.output
        row = next(line for line in result.output.splitlines() if line.startswith("tra TP2 recompute"))
        assert row.split()[3:6] == ["gen", "colocated", "1.0"]


def test_devices_that_are_not_known_end_it() -> None:
    result = CliRunner().invoke(cli, ["plan", "recipe.toml", "--gpus", "8xA100"])
    assert result.exit_code == 2
    assert "H100, H200, GB200" in result.output
