"""The program of docs/python.md runs, and what follows it there."""

import runpy

from markdown_blocks import ROOT, blocks, write_files

from rlcore.testing.models import make_model

DOCUMENT = ROOT / "docs" / "python.md"


def test_the_program_runs_and_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(DOCUMENT, tmp_path)
    make_model(tmp_path / "model", alphabet="0123456789+=", max_length=64)
    names = runpy.run_path(str(tmp_path / "sums.py"))
    assert names["run"].metrics["step"].tolist() == [0, 1, 2]
    [after] = [block.text for block in blocks(DOCUMENT) if block.language == "python" and not block.file_name]
    exec(after, names)
    last = names["run"].metrics["evaluation/pass@1"][-1]
    assert capsys.readouterr().out.splitlines()[-1] == str(float(last))
