"""Steps that `rlcore record` and the recipe's keys write to bundles."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import rlcore
from rlcore.spi import CheckpointError, ConfigError
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.observer import Alarms
from rlcore_bundles.record_command import record_command
from rlcore_bundles.recording import record
from rlcore_bundles.replay import replay
from rlcore_bundles.storage import read_bundle, write_bundle


def test_a_recorded_step_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    output = tmp_path / "bundle"
    ran = CliRunner().invoke(record_command, [str(finished), "--step", "3", "-o", str(output)])
    assert ran.exit_code == 0, ran.output
    assert "are equal to the last bit" in ran.output
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    bundle = read_bundle(output)
    assert (bundle.step, bundle.weights, bundle.prompts) == (3, "model", "kept")
    assert (output / "model" / "config.json").is_file()


def test_the_first_step_is_recorded_from_the_beginning(finished: Path, tmp_path: Path) -> None:
    found = record(finished, 1, tmp_path / "first", weights="none")
    assert not found.differing
    assert found.num_equal > 10
    assert found.bundle.weight_version == 0
    assert found.num_bytes < 2**20


def test_what_a_run_wrote_and_what_is_recorded_later_are_one_step(finished: Path, recorded: Bundle, tmp_path: Path) -> None:
    later = record(finished, 2, tmp_path / "second", weights="state").bundle
    np.testing.assert_array_equal(later.sampled.batch.tokens, recorded.sampled.batch.tokens)
    np.testing.assert_array_equal(later.trained.token_columns["advantages"], recorded.trained.token_columns["advantages"])
    assert [one.grad_norm for one in later.updates] == [one.grad_norm for one in recorded.updates]
    assert later.digests_after == recorded.digests_after
    assert later.digests_before == recorded.digests_before
    assert later.digests_after != later.digests_before


@pytest.mark.parametrize(("prompts", "num_hashes"), [("hashed", 16), ("left out", 0)])
def test_prompts_may_stay_at_home(finished: Path, tmp_path: Path, prompts: Any, num_hashes: int) -> None:
    record(finished, 2, tmp_path / "bundle", prompts=prompts, weights="none")
    bundle = read_bundle(tmp_path / "bundle")
    assert len(bundle.row_hashes) == num_hashes
    generated = bundle.sampled.batch.token_columns["weight_versions"] >= 0
    assert not bundle.sampled.batch.tokens[~generated].any()
    assert bundle.sampled.batch.tokens[generated].any()
    content = b"".join(path.read_bytes() for path in (tmp_path / "bundle").iterdir())
    assert b'"prompt"' not in content
    with pytest.raises(ConfigError) as error:
        replay(bundle)
    assert prompts in str(error.value)


@pytest.mark.parametrize("step", [0, 4, -1])
def test_a_step_that_the_run_does_not_have_is_refused(finished: Path, tmp_path: Path, step: int) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError) as error:
        record(finished, step, tmp_path / "taken")
    assert {problem.path for problem in error.value.problems} == {"--step", "--output"}


def test_alarms_name_their_cause() -> None:
    alarms = Alarms(warn_above=1.5)
    assert alarms.cause({"reward_mean": 0.8, "entropy": 2.0, "token_mult_prob_error": 1.01}) == ""
    assert alarms.cause({"reward_mean": 0.7, "loss": float("nan")}) == "loss is nan"
    assert alarms.cause({"reward_mean": 0.7, "token_mult_prob_error": 1.6}) == "token_mult_prob_error is 1.6, above 1.5"
    assert alarms.cause({"reward_mean": 0.1}) == "reward_mean is 0.1, and was 0.8"
    assert alarms.cause({"reward_mean": 0.09}) == ""  # told once
    assert alarms.cause({"entropy": 0.4}) == "entropy is 0.4, and was 2"


def test_a_collapse_is_written_without_being_asked_for(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    calls = []

    def fades(completion: str) -> float:
        calls.append(completion)
        return 1.0 if len(calls) <= 64 else 0.0

    recipe = recipe_of(tmp_path, logging={"bundles_every_n_steps": 0, "bundles_on_alarm": True})
    del recipe["environment"]
    run = rlcore.train(recipe, reward=fades, progress="silent")
    assert [path.name for path in (run.path / "bundles").iterdir()] == ["step-000002"]
    assert read_bundle(run.path / "bundles" / "step-000002").alarm == "reward_mean is 0, and was 1"


def _cut(folder: Path) -> None:
    file = folder / "arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _changed(folder: Path) -> None:
    file = folder / "texts.json"
    file.write_text(file.read_text().replace("answer", "amswer", 1))


def _header(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "bundle.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def _outside(folder: Path) -> None:
    file = folder / "bundle.json"
    header = json.loads(file.read_text())
    header["files"]["../texts.json"] = header["files"]["texts.json"]
    file.write_text(json.dumps(header))


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (_cut, "arrays.safetensors: found"),
    "changed": (_changed, "texts.json: found another content"),
    "missing": (lambda folder: (folder / "texts.json").unlink(), "texts.json: found no such file"),
    "newer": (_header(format=3), "found format 3; expected 1 or 2. Install a newer"),
    "without its calls": (_header(format=2), "found format 2 with own_step = None and 2 updates"),
    "no format": (_header(format=None), "found format None"),
    "no files": (_header(files=[]), "bundle.json.files: found an array of 0"),
    "outside": (_outside, "'../texts.json'"),
    "no header": (lambda folder: (folder / "bundle.json").unlink(), "found no bundle.json"),
    "no JSON": (lambda folder: (folder / "bundle.json").write_text("{"), "found no JSON"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_bundle_is_refused(recorded: Bundle, tmp_path: Path, fault: str) -> None:
    damage, message = DAMAGED[fault]
    write_bundle(recorded, tmp_path / "bundle")
    damage(tmp_path / "bundle")
    with pytest.raises(CheckpointError) as error:
        read_bundle(tmp_path / "bundle")
    assert message in str(error.value)
