"""The program of `make try-dist` is README's."""

from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
TRAINS = "```python\nimport rlcore\nrun = rlcore.train()\n```\n"


def test_readme_has_one_block_that_trains(first_run):
    program = first_run.first_lines(README.read_text())
    assert "rlcore.train(" in program
    compile(program, "README.md", "exec")


@pytest.mark.parametrize("text", ["", "```python\nimport rlcore\n```\n", TRAINS + TRAINS])
def test_none_or_several_are_refused(first_run, text):
    with pytest.raises(SystemExit, match="Python blocks"):
        first_run.first_lines(text)
