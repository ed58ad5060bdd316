"""`rlcore check`: what would run, on which devices."""

from pathlib import Path

import pytest
from attrs import evolve

import rlcore.run.plan.prepare
from rlcore.spi import ClusterConfig

from .conftest import prepared


def test_check_says_what_would_run(invoke, calls) -> None:
    result = invoke("check", "r.toml", "run.seed=3")
    assert result.exit_code == 0
    assert calls.prepared == [(Path("r.toml"), ["run.seed=3"])]
    assert not calls.trained
    lines = {line.split()[0]: line for line in result.output.splitlines()}
    assert result.stdout.startswith("ok: r.toml")
    note = "note: trainer 'tra' (priority 50) is taken, as 'big' (priority 80) cannot be: needs a GPU\n"
    assert result.stderr == f"{note}note: odd\n"
    assert "  train data    3 rows of x.jsonl\n  first prompt\n    | <bos>1+1=\n    | \n  answer\n    | '2'\n" in result.stdout
    assert lines["trainer"].split(maxsplit=1)[1] == "tra 1.2 of acme-tra (auto, priority 50)"
    assert lines["generator"].split(maxsplit=1)[1] == "gen 1.2 of acme-gen (named)"
    assert lines["observer"].split(maxsplit=1)[1] == "obs 1.2 of acme-obs (named)"
    assert "some/model, not a directory here: to be fetched from the Hub" in lines["model"]
    assert "cluster" not in lines
    assert lines["refit"].split() == ["refit", "in_process"]
    assert "32 prompts x 8 samples" in lines["each"]
    assert lines["evaluation"].split(maxsplit=1)[1] == "at the start, at the end"


@pytest.mark.parametrize(
    ("cluster", "num_ranks", "expected"),
    [
        (ClusterConfig(gpus_per_node=4), 1, "1 x 4 GPU(s) train and generate in turn"),
        (ClusterConfig(nodes=2, gpus_per_node=4), 2, "2 x 4 GPU(s) train and generate in turn, each 2 with one generator"),
        (
            ClusterConfig(gpus_per_node=8, placement="separate", generator_gpus_per_node=3),
            1,
            "1 x 5 GPU(s) train, 1 x 3 generate",
        ),
        (
            ClusterConfig(gpus_per_node=8, reference_gpus_per_node=2),
            1,
            "1 x 2 hold the reference, 1 x 6 GPU(s) train and generate in turn",
        ),
    ],
)
def test_check_says_who_uses_which_devices(
    invoke, calls, monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig, num_ranks: int, expected: str
) -> None:
    found = prepared()
    found.recipe = evolve(found.recipe, cluster=cluster)
    found.device, found.ranks_per_generator, found.runs_here = "cuda", num_ranks, False
    found.chosen["execution"] = evolve(found.chosen["trainer"], role="execution", name="threads")
    monkeypatch.setattr(rlcore.run.plan.prepare, "prepare", lambda *_: found)

    def shown() -> str:
        lines = invoke("check", "r.toml").stdout.splitlines()
        return next(line.removeprefix("  cluster").strip() for line in lines if line.startswith("  cluster "))

    assert shown() == expected
    execution = next(line for line in invoke("check", "r.toml").stdout.splitlines() if line.startswith("  execution "))
    assert execution.split(maxsplit=1)[1] == "threads 1.2 of acme-tra (auto, priority 50)"
    del found.chosen["generator"]
    assert shown() == f"{expected.split(' train')[0]} train"
