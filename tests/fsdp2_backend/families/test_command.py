"""The command, with outcomes that a file holds; trials are in test_trial."""

import pytest
from attrs import evolve

from rlcore_fsdp2.families import trial
from rlcore_fsdp2.families.command import main
from rlcore_fsdp2.families.outcome import Outcome
from rlcore_fsdp2.families.results import add_outcome, code_version, known_outcomes
from rlcore_fsdp2.families.table import BEGIN, END, written

LLAMA = Outcome(model_type="llama", class_name="LlamaForCausalLM", trainer="agrees", generator="agrees")


@pytest.mark.parametrize("verdict", ["agrees", "refused"])
def test_known_outcomes_are_not_tried_again(verdict, tmp_path, capsys):
    results, page = tmp_path / "results", tmp_path / "page"
    add_outcome(results, code_version(), evolve(LLAMA, trainer=verdict))
    page.write_text(written(f"{BEGIN}\n{END}\n", [evolve(LLAMA, model_type="other")]))
    assert main(["--only", "llama", "--results", str(results), "--write", str(page)]) == 0
    assert f"1 {verdict} and agrees" in capsys.readouterr().out
    assert f"| llama | {verdict} |" in page.read_text()
    assert "| other | agrees |" in page.read_text()


@pytest.mark.parametrize(
    ("code", "verdict", "is_known"),
    [("one", "agrees", True), ("another", "agrees", False), ("one", "wrong", False), ("one", "crashed", False)],
)
def test_outcomes_of_other_code_and_unsound_ones_are_tried_again(code, verdict, is_known, tmp_path):
    add_outcome(tmp_path / "results", code, evolve(LLAMA, trainer=verdict))
    assert ("llama" in known_outcomes(tmp_path / "results", "one")) == is_known
    assert known_outcomes(tmp_path / "none", "one") == {}


@pytest.mark.parametrize(("verdict", "status"), [("agrees", 0), ("refused", 1), ("wrong", 1)])
def test_one_model_has_to_agree(verdict, status, monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "try_model", lambda *_, **__: evolve(LLAMA, trainer=verdict, generator=verdict))
    assert main(["--model", str(tmp_path)]) == status


@pytest.mark.parametrize(
    ("trainer", "generator", "agrees"),
    [
        ("agrees", "agrees", True),
        ("agrees", "not tried", True),
        ("agrees", "refused", False),
        ("refused", "agrees", False),
        ("not tried", "not tried", False),
    ],
)
def test_a_generator_that_is_not_tried_does_not_count(trainer, generator, agrees):
    assert evolve(LLAMA, trainer=trainer, generator=generator).agrees == agrees


def test_a_model_has_to_be_a_directory(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path / "none")])
    assert "no directory" in capsys.readouterr().err


def test_an_unknown_family_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "llama", "no_such_family"])
    assert "no_such_family" in capsys.readouterr().err
