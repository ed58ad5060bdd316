"""Samples in a page: how they spread, which are shown, and how much of them."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rlcore.run.storage.saved_run import SavedRun
from rlcore_report.samples import MAX_STEPS, MAX_TOKENS, NATS, readable, spreads
from rlcore_report.token_pieces import TokenPieces

from .made_runs import NASTY, make_run


class Letters:
    def show(self, tokens: list[int]) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


LETTERS = TokenPieces(Letters())  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> SavedRun:
    return SavedRun.find(make_run(tmp_path / "run", 30, tokens=6))


def test_spreads_are_of_valid_samples(run: SavedRun) -> None:
    reward, length = spreads(run)
    table = run.samples(20).to_pandas()
    table = table[table["valid"]]
    finite = table["reward"][np.isfinite(table["reward"])].to_numpy(np.float64)
    assert reward["steps"] == [10, 20, 30]
    np.testing.assert_allclose(reward["quantiles"][1], np.quantile(finite, [0.05, 0.25, 0.5, 0.75, 0.95]), rtol=1e-6)
    assert [sum(counts) for counts in length["counts"]] == [
        int(run.samples(step)["valid"].to_numpy().sum()) for step in (10, 20, 30)
    ]
    widest = length["high"] - length["low"]
    assert len(length["counts"][0]) == widest, "a bin for each whole number"
    assert length["counts"][1] == [
        int((table["num_generated"] == number).sum()) for number in np.arange(length["low"] + 0.5, length["high"])
    ]


def test_a_run_without_samples_or_valid_ones_has_no_spread(run: SavedRun) -> None:
    for file in (run.path / "rollouts").glob("*.parquet"):
        table = parquet.read_table(file)
        index = table.schema.get_field_index("valid")
        parquet.write_table(table.set_column(index, "valid", pa.array([False] * table.num_rows)), file)
    assert spreads(run) == []


def test_rewards_too_far_apart_for_a_difference_have_no_spread(run: SavedRun) -> None:
    for file in (run.path / "rollouts").glob("*.parquet"):
        table = parquet.read_table(file)
        values = pa.array(np.resize([1e308, -1e308, 1.0], table.num_rows))
        parquet.write_table(table.set_column(table.schema.get_field_index("reward"), "reward", values), file)
    assert spreads(run)[0]["quantiles"] == [[1.0] * 5] * 3


def test_samples_have_their_tokens_with_log_probabilities(run: SavedRun) -> None:
    shown = readable(run, LETTERS, 10**6)
    assert [(entry["kind"], entry["step"], entry["num_samples"], entry["num_shown"]) for entry in shown] == [
        ("step", 10, 16, 16),
        ("step", 20, 16, 16),
        ("step", 30, 16, 16),
    ]
    row, sample = run.samples(20).to_pylist()[5], shown[1]["groups"][1]["samples"][1]
    assert "".join(sample["pieces"]) == Letters().show(row["tokens"][2:])
    np.testing.assert_allclose(sample["logprobs"], NATS * np.array(row["generation_logprobs"][2:]), atol=0.5)
    assert (sample["advantage"], sample["gap"], sample["valid"]) == (0.5, None, row["valid"])
    assert shown[0]["groups"][0]["samples"][0]["reward"] is None, "which is not finite"
    assert shown[0]["groups"][2]["prompt"] == f"{NASTY} 2"


def test_without_a_tokenizer_there_is_the_answer_as_a_whole(run: SavedRun) -> None:
    sample = readable(run, None, 10**6)[0]["groups"][0]["samples"][1]
    assert sample["pieces"] is None
    assert sample["text"] == f"{NASTY} answer 1"


def test_long_answers_lose_their_middle(tmp_path: Path) -> None:
    run = SavedRun.find(make_run(tmp_path / "run", 10, tokens=2000, samples=8))
    rows = run.samples(10).to_pylist()
    shown = [sample for group in readable(run, LETTERS, 10**6)[0]["groups"] for sample in group["samples"]]
    long = 0
    for row, sample in zip(rows, shown, strict=True):
        tokens = row["tokens"][2:]
        if len(tokens) > MAX_TOKENS:
            long += 1
            assert sample["gap"] == [300, len(tokens) - MAX_TOKENS]
            assert "".join(sample["pieces"]) == Letters().show([*tokens[:300], *tokens[-100:]])
    assert long > 2


def test_no_more_is_shown_than_was_asked_for(tmp_path: Path) -> None:
    run = SavedRun.find(make_run(tmp_path / "run", 400, tokens=300))
    shown = readable(run, LETTERS, 60_000)
    assert len(shown) == MAX_STEPS
    assert (shown[0]["step"], shown[-1]["step"]) == (10, 400)
    assert all(1 <= entry["num_shown"] < 16 for entry in shown)
    assert len(json.dumps(shown)) < 90_000


def test_the_last_evaluation_is_shown_too(run: SavedRun) -> None:
    for step in (0, 30):
        source = run.path / "rollouts" / "step-000010.parquet"
        table = parquet.read_table(source).drop(["advantages"])
        parquet.write_table(table, run.path / "rollouts" / f"evaluation-{step:06d}.parquet")
    last = readable(run, LETTERS, 10**6)[-1]
    assert (last["kind"], last["step"], last["groups"][0]["samples"][0]["advantage"]) == ("evaluation", 30, None)
