"""Commands on damaged bundles and runs, and with wrong options: one message, and the documented exit code."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import evolve
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.spi import CheckpointError
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.json_output import json_text
from rlcore_bundles.storage import read_bundle, write_bundle
from rlcore_torchkit.testing.models import make_model

HEADER = "bundle.json"
WRONG: tuple[Any, ...] = ("x", -3, 1e300, [None], True, {"a": None})
OF_UPDATE = ("num_loss_tokens", "loss", "loss_config", "loss_value", "grad_norm", "metrics", "gradient_norms")


@pytest.fixture
def bundle(recorded: Bundle, tmp_path: Path) -> Path:
    """The folder of a bundle of its own."""
    write_bundle(evolve(recorded, weights="none"), tmp_path / "bündle 1")
    return tmp_path / "bündle 1"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header = json.loads((folder / HEADER).read_text())
    change(header)
    (folder / HEADER).write_text(json.dumps(header))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_bundle(folder)
    return str(error.value)


@pytest.mark.parametrize(
    "key", ["step", "recipe", "environment", "prompts", "weights", "metrics", "sampled", "updates", "digests", "files"]
)
def test_a_key_of_another_type_is_named(bundle: Path, key: str) -> None:
    good = (bundle / HEADER).read_text()
    for value in WRONG:
        if (key, value) == ("recipe", "x") or (key, value) == ("updates", []):
            continue
        (bundle / HEADER).write_text(good)
        edit(bundle, lambda header, value=value: header.update({key: value}))  # type: ignore[misc]
        message = refused(bundle)
        assert "bundle.json" in message, (value, message)
        assert max(map(len, message.splitlines())) < 400
    (bundle / HEADER).write_text(good)
    edit(bundle, lambda header: header.pop(key))
    assert f"{key}: found nothing" in refused(bundle)


@pytest.mark.parametrize("key", OF_UPDATE)
def test_a_key_of_an_update_of_another_type_is_named(bundle: Path, key: str) -> None:
    good = (bundle / HEADER).read_text()
    for value in ("x", [None], True) if key != "loss" else (3, [None], True):
        (bundle / HEADER).write_text(good)
        edit(bundle, lambda header, value=value: header["updates"][0].update({key: value}))  # type: ignore[misc]
        assert "bundle.json.updates[0]" in refused(bundle)


def test_a_recipe_that_is_none_is_named(bundle: Path) -> None:
    edit(bundle, lambda header: header.update(recipe="[run]\n"))
    assert "without the table [model]" in refused(bundle)


def test_a_file_with_a_name_that_no_system_has_is_named(bundle: Path) -> None:
    edit(bundle, lambda header: header["files"].update({"a" * 5000: {"bytes": 1, "sha256": ""}}))
    assert "expected one within the folder" in refused(bundle)


def test_texts_of_another_type_are_named(bundle: Path) -> None:
    texts = json.loads((bundle / "texts.json").read_text())
    (bundle / "texts.json").write_text(json.dumps(texts | {"rows": [3], "responses": "x"}))
    described = {"bytes": (bundle / "texts.json").stat().st_size, "sha256": ""}
    described["sha256"] = hashlib.sha256((bundle / "texts.json").read_bytes()).hexdigest()
    edit(bundle, lambda header: header["files"].update({"texts.json": described}))
    message = refused(bundle)
    assert "texts.json.rows[0]" in message
    assert "texts.json.responses" in message


def test_a_function_in_a_bundle_is_not_executed(bundle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    (bundle / "own.py").write_text(f"open({str(trace)!r}, 'w')\ndef score(completion, answer):\n    return 0.0\n")
    lines = json.loads((bundle / HEADER).read_text())["recipe"].splitlines()
    recipe = "\n".join(f'path = "{bundle}/own.py:score"' if "score.py" in line else line for line in lines)
    edit(bundle, lambda header: header.update(recipe=recipe))
    ran = CliRunner().invoke(cli, ["replay", str(bundle), "--weights", str(tmp_path)])
    assert (ran.exit_code, trace.exists()) == (2, False), ran.output
    assert "own.py, within the bundle; expected a file of this machine" in ran.output


@pytest.mark.parametrize("command", ["replay", "bisect"])
def test_code_of_a_bundled_model_is_not_executed(recorded: Bundle, tmp_path: Path, command: str) -> None:
    assert recorded.directory is not None
    folder, trace = tmp_path / "bundle", tmp_path / "executed"
    shutil.copytree(recorded.directory, folder)
    (folder / "model" / "own.py").write_text(f"open({str(trace)!r}, 'w')\nclass Own:\n    pass\n")
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    content = (folder / "model" / "config.json").read_bytes()
    described = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert "trust_remote_code = false" in recorded.recipe
    trusting = recorded.recipe.replace("trust_remote_code = false", "trust_remote_code = true")
    edit(folder, lambda header: (header.update(recipe=trusting), header["files"].update({"model/config.json": described})))
    ran = CliRunner().invoke(cli, [command, *([str(folder)] * (1 + (command == "bisect")))])
    assert (ran.exit_code, trace.exists()) == (5, False), ran.output
    assert "set model.trust_remote_code to true" in ran.output


def test_a_model_without_the_tokens_of_the_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "small", alphabet="01", max_length=32)
    ran = CliRunner().invoke(cli, ["replay", str(bundle), "--weights", str(tmp_path / "small")])
    assert (ran.exit_code, "expected one that has the bundle's tokens" in ran.output) == (2, True), ran.output


COMMANDS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "certificate over its JSON": (("certify", "RUN", "-o", "TMP/page.json"), 2, "expected a file of another suffix"),
    "certificate of no name": (("certify", "RUN", "-o", "."), 2, "--output: found ."),
    "certificate to a folder": (("certify", "RUN", "-o", "TMP/void"), 2, "a folder; expected the name of a file"),
    "record of a recipe without steps": (("record", "TMP/void", "--step", "1", "-o", "TMP/new"), 6, "run.num_steps = None"),
    "record below a file": (("record", "RUN", "--step", "1", "-o", "TMP/text/new"), 11, "name another folder"),
    "diff without a common step": (("diff", "TMP/void", "RUN"), 6, "found 0 steps in"),
    "bisect without a common step": (("bisect", "TMP/void", "RUN"), 6, "found 0 steps in"),
    "diff of a binary recipe": (("diff", "TMP/binary", "RUN"), 6, "recipe.toml is damaged"),
    "bisect by no interpreter": (("bisect", "RUN", "RUN", "--python", "TMP/none"), 2, "none, no such file"),
    "bisect by a text": (("bisect", "RUN", "RUN", "--python", "TMP/text"), 2, "text, which cannot be executed"),
    "compare by a text": (("compare", "BUNDLE", "--with", "trl", "--python", "TMP/text"), 2, "cannot be executed"),
    "no number moved": (("compare", "BUNDLE", "--with", "trl", "--move", "nan"), 2, "expected a finite number"),
    "option of a list": (("compare", "BUNDLE", "advantage_epsilon=[1]", "--with", "trl"), 2, "expected a number, or none"),
    "option of a bool": (("compare", "BUNDLE", "advantage_epsilon=true", "--with", "trl"), 2, "expected a number, or none"),
    "a dump of no framework": (("compare", "--with", "none", "--from", "TMP/good.parquet"), 3, "--with: found 'none'"),
    "a dump without an input": (("compare", "--with", "verl", "--from", "TMP/dump.jsonl"), 6, "dump.jsonl, line 2: found"),
    "a dump of texts": (("compare", "--with", "trl", "--from", "TMP/texts.parquet"), 6, "as advantage in row 0"),
    "a dump of nulls": (("compare", "--with", "trl", "--from", "TMP/nulls.parquet"), 6, "as advantage in row 1"),
    "an empty dump": (("compare", "--with", "trl", "--from", "TMP/empty.parquet"), 6, "found no sample"),
}


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_mistake_ends_with_one_message(finished: Path, recorded: Bundle, tmp_path: Path, mistake: str) -> None:
    for name, content in (("void", b""), ("binary", b"\xff\xfe[")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_bytes(content)
    shutil.copy(finished / "metrics.jsonl", tmp_path / "binary")
    (tmp_path / "text").write_text("x")
    (tmp_path / "dump.jsonl").write_text('{"input": "a", "output": "b", "score": 1.0}\n{"output": "b", "score": 1.0}\n')
    for name, advantages in (("good", [-1.0, 1.0]), ("texts", ["q", "r"]), ("nulls", [1.0, None]), ("empty", [])):
        count = len(advantages)
        columns = {"prompt": ["a"] * count, "completion": ["b"] * count, "advantage": advantages, "score": [1.0, 0.0][:count]}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    words, code, message = COMMANDS[mistake]
    places = {"RUN": str(finished), "BUNDLE": str(recorded.directory), "TMP": str(tmp_path)}
    arguments = [places.get(word, word.replace("TMP", str(tmp_path))) for word in words]
    before = set(tmp_path.rglob("*"))
    ran = CliRunner().invoke(cli, arguments)
    assert (ran.exit_code, message in ran.output) == (code, True), ran.output
    assert set(tmp_path.rglob("*")) == before


def test_a_claim_that_does_not_hold_exits_with_1(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "recipe.toml").write_text("")
    ran = CliRunner().invoke(cli, ["certify", str(tmp_path / "run")])
    assert (ran.exit_code, "unexpected" in ran.output) == (1, False)


def test_json_has_no_word_for_what_is_not_finite() -> None:
    assert json.loads(json_text({"a": [float("nan"), 1.0], "b": float("inf")})) == {"a": [None, 1.0], "b": None}
