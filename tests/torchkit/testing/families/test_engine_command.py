"""The command and its table, with outcomes that files hold; trials are in test_engine_trial."""

import json
import os

import pytest
from attrs import evolve

from rlcore_torchkit.testing.families import engine_command
from rlcore_torchkit.testing.families.children import ChildError, in_child
from rlcore_torchkit.testing.families.engine_command import main
from rlcore_torchkit.testing.families.engine_outcome import EngineOutcome
from rlcore_torchkit.testing.families.engine_table import marks, require_marks, summary, written

from .tried_engine import Engine

GOOD = EngineOutcome(
    model_type="llama", implementation="Llama", verdict="agrees", dtype="float32", distance=2e-6, num_tensors=9, num_changed=5
)
BAD = EngineOutcome(model_type="odd", implementation="Odd", verdict="cannot", reason="one | two <x>")
BEGIN, END = marks("engines", "cpu")


class Command(Engine):
    command = "engines"

    def __init__(self, device):
        super().__init__()


def test_the_table_replaces_what_is_between_its_marks():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = written(page, [BAD, GOOD], "version 1, today", "engines", "cpu", {})
    assert (once.partition(BEGIN)[0], once.partition(END)[2]) == ("before\n", "\nafter\n")
    assert "version 1, today. 2 families: 1 cannot, 1 agrees." in once
    assert "| llama | agrees | 2e-06 |  |\n| odd | cannot |  | one \\| two &lt;x> |" in once
    assert written(once, [BAD, GOOD], "version 1, today", "engines", "cpu", {}) == once
    assert "| odd | cannot |  | no kernel |" in written(page, [BAD], "version 1", "engines", "cpu", {"two .x": "no kernel"})
    rounded = evolve(GOOD, dtype="bfloat16", mean=1e-2, reason="in float32: " + "word " * 60)
    row = next(line for line in written(page, [rounded], "1", "engines", "cpu", {}).splitlines() if "llama" in line)
    assert row.startswith("| llama | agrees | 2e-06 in bfloat16, mean 1e-02 | in float32: word")
    assert row.endswith("word … |")
    with pytest.raises(ValueError, match="cuda"):
        require_marks(once, "engines", "cuda")
    with pytest.raises(ValueError, match="cpu"):
        require_marks(f"{END}\n{BEGIN}", "engines", "cpu")


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (GOOD, 0),
        (BAD, 0),
        (evolve(GOOD, verdict="wrong"), 1),
        (evolve(GOOD, verdict="not tried"), 0),
        (evolve(GOOD, verdict="crashed"), 1),
    ],
)
def test_outcomes_are_kept_and_written(outcome, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine_command, "in_child", lambda *_, **__: outcome)
    page, file = tmp_path / "page", tmp_path / "file"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert main(Command, ["--families", "llama", "--device", "cpu", "--json", str(file), "--write", str(page)]) == status
    assert summary([outcome]) in capsys.readouterr().out
    table = page.read_text()
    page.write_text(f"{BEGIN}\n{END}\n")
    assert main(Command, ["--read", str(file), "--write", str(page)]) == status
    assert page.read_text() == table
    assert f"| {outcome.model_type} | {outcome.verdict} |" in table


def test_what_has_no_kernel_in_float32_is_tried_in_bfloat16(monkeypatch, capsys):
    def tried(function, arguments, *_, **__):
        dtype = arguments[-1]
        return evolve(BAD if dtype == "float32" else GOOD, dtype=dtype)

    monkeypatch.setattr(engine_command, "in_child", tried)
    assert main(Command, ["--families", "llama", "--device", "cpu"]) == 0
    line = capsys.readouterr().err
    assert line.startswith("llama: agrees bfloat16")
    assert BAD.reason in line


def test_a_child_that_ends_is_a_crash(monkeypatch, capsys):
    def lost(*_, **__):
        raise ChildError("over 3 s")

    monkeypatch.setattr(engine_command, "in_child", lost)
    assert main(Command, ["--families", "llama", "--device", "cpu"]) == 1
    assert "llama: crashed (0 s) over 3 s" in capsys.readouterr().err


def test_unknown_families_and_files_of_several_engines_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(Command, ["--families", "llama,no_such_family", "--device", "cpu"])
    assert "no_such_family" in capsys.readouterr().err
    for number in (1, 2):
        record = {"device": "cpu", "versions": f"{number}", "date": "today", "outcomes": []}
        (tmp_path / str(number)).write_text(json.dumps(record))
    with pytest.raises(SystemExit):
        main(Command, ["--read", str(tmp_path / "1"), str(tmp_path / "2")])
    assert "expected one device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--read", "good.json", "--families", "llama"], "--families"),
        (["--read", "good.json", "--json", "other.json"], "--json"),
        (["--read", "good.json", "--jobs", "2"], "--jobs"),
        (["--read", "absent.json"], "absent.json"),
        (["--read", "broken.json"], "--read"),
        (["--read", "good.json", "--write", "page"], "found no <!-- families on cpu"),
        (["--families", "llama", "--device", "cpu", "--write", "page"], "found no <!-- families on cpu"),
        (["--families", "llama", "--device", "cpu", "--write", "absent"], "absent"),
    ],
)
def test_options_that_nothing_reads_and_unusable_files_are_refused_first(arguments, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_command, "in_child", None)
    record = {"device": "cpu", "versions": "1", "date": "today", "outcomes": [GOOD.content()]}
    for name, content in {"good.json": json.dumps(record), "broken.json": "{", "page": "no marks"}.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(Command, arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_children_answer_or_are_ended():
    assert in_child(max, (1, 2), 60.0) == 2
    with pytest.raises(ChildError, match="ended with 3"):
        in_child(os._exit, (3,), 60.0)
    with pytest.raises(ChildError, match="over 0 s"):
        in_child(max, (1, 2), 0.0)
