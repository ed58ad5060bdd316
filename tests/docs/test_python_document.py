"""The program of docs/python.md runs, and what follows it there."""

import runpy

from markdown_blocks import ROOT, blocks, write_files

DOCUMENT = ROOT / "docs" / "python.md"


def test_readme_begins_with_this_program():
    first = [next(blocks(page)).text for page in (ROOT / "README.md", DOCUMENT)]
    assert first[0] == first[1]


def test_the_program_runs_and_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(DOCUMENT, tmp_path)
    names = runpy.run_path(str(tmp_path / "sums.py"))
    before, after = map(float, capsys.readouterr().out.splitlines()[-1].split())
    assert before == 0.0, "the first figure is one, and nothing is learned yet"
    assert after >= 0.5, "the page says that most answers are right"
    [following] = [block.text for block in blocks(DOCUMENT) if block.language == "python" and not block.file_name]
    exec(following, names)
    last = names["run"].metrics["eval/pass@1"][-1]
    assert capsys.readouterr().out.splitlines()[-1] == str(float(last))
