"""metrics.jsonl is read back whole, or each damaged line is named."""

from pathlib import Path

import pytest

from rlcore.run.report.metrics_file import read_metrics_file
from rlcore.spi import CheckpointError

STEPS = b'{"step": 0, "loss": 1.5}\n{"step": 1, "loss": NaN}\n'


@pytest.mark.parametrize("rest", [b"", b'{"step": 2, "lo', b"\0\0\0", b"7", b"\xff"])
def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(STEPS + rest)
    assert [record["step"] for record in read_metrics_file(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_last_line_that_only_lacks_its_end_counts(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(STEPS[:-1])
    assert len(read_metrics_file(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ((1, 0), "line 2: found step 0 behind step 1"),
        ((0, 1, 1), "line 3: found step 1 behind step 1"),
        ((0, 71, 2, 3), "line 3: found step 2 behind step 71"),
    ],
)
def test_steps_out_of_order_are_named(tmp_path: Path, steps: tuple[int, ...], found: str) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in steps))
    with pytest.raises(CheckpointError) as caught:
        read_metrics_file(tmp_path / "metrics.jsonl")
    assert str(caught.value).count("found step") == 1
    assert f"{tmp_path / 'metrics.jsonl'} is damaged" in str(caught.value)
    assert found in str(caught.value)


def test_a_later_line_adds_to_the_figures_of_its_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        STEPS.replace(b"NaN", b"0.5") + b'{"step": 2, "loss": 0.25}\n{"step": 1, "checkpoint_eval/a": 3}\n'
    )
    expected = [{"step": 0, "loss": 1.5}, {"step": 1, "loss": 0.5, "checkpoint_eval/a": 3}, {"step": 2, "loss": 0.25}]
    assert read_metrics_file(tmp_path / "metrics.jsonl") == expected


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"{", "'{'"),
        (b"\xff\xfe", r"'\\xff\\xfe'"),
        (b"[1, 2]", "'[1, 2]'"),
        (b"", "''"),
        (b'{"loss": 1.0}', "'{\"loss\": 1.0}'"),
        (b'{"step": -3, "loss": 1.0}', '\'{"step": -3, "loss": 1.0}\''),
        (b'{"step": "3"}', '\'{"step": "3"}\''),
        (b'{"step": 3, "reward_mean": "high"}', "reward_mean = 'high'"),
    ],
)
def test_every_damaged_line_is_named(tmp_path: Path, line: bytes, found: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(line + b"\n" + STEPS + line + b"\n")
    with pytest.raises(CheckpointError) as caught:
        read_metrics_file(file)
    assert str(file) in str(caught.value)
    assert f"line 1: found {found}\n" in str(caught.value)
    assert f"line 4: found {found}\n" in str(caught.value)
