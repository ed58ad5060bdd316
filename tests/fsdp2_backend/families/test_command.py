"""The command, with outcomes that a file holds; trials are in test_trial."""

import json

import pytest
from attrs import asdict

from rlcore_fsdp2.families.command import main
from rlcore_fsdp2.families.outcome import Outcome
from rlcore_fsdp2.families.table import BEGIN, END


@pytest.mark.parametrize(("verdict", "status"), [("agrees", 0), ("refused", 0), ("wrong", 1), ("crashed", 1), ("not tried", 1)])
def test_known_outcomes_are_not_tried_again(verdict, status, tmp_path, capsys):
    outcome = Outcome(model_type="llama", class_name="LlamaForCausalLM", trainer=verdict, generator="agrees")
    (tmp_path / "results").write_text(json.dumps(asdict(outcome)) + "\n")
    (tmp_path / "page").write_text(f"{BEGIN}\n{END}\n")
    arguments = ["--only", "llama", "--results", str(tmp_path / "results"), "--write", str(tmp_path / "page")]
    assert main(arguments) == status
    assert f"1 {verdict} and agrees" in capsys.readouterr().out
    assert f"| llama | {verdict} |" in (tmp_path / "page").read_text()


def test_an_unknown_family_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "llama", "no_such_family"])
    assert "no_such_family" in capsys.readouterr().err
