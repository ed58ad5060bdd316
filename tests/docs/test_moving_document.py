"""docs/moving.md: its recipe is accepted, and every key that it names is one of rlcore's."""

import json
import re

from click.testing import CliRunner
from markdown_blocks import ROOT, write_files

from rlcore.cli.main import cli
from rlcore_torchkit.testing.models import make_model

DOCUMENT = ROOT / "docs" / "moving.md"
NOT_OURS = {"data.train_batch_size"}
"""Keys of other libraries that stand in our column, as part of a formula."""


def reference():
    """Every key of docs/config.md, and every section."""
    keys, section = set(), ""
    for line in (ROOT / "docs" / "config.md").read_text().splitlines():
        if heading := re.match(r"## `\[(.+)\]`", line):
            section = heading[1]
            keys.add(section)
        elif section and (row := re.match(r"\| `(\w+)` \|", line)):
            keys.add(f"{section}.{row[1]}")
    return keys


def test_every_key_is_in_the_reference():
    rows = [line.rstrip("|").rpartition("|")[2] for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    named = {
        key
        for cell in rows
        for key in re.findall(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)+)(?: = [^`]*)?`", cell)
        if not key.startswith("rlcore.")
    }
    assert len(named) > 60
    assert not named - reference() - NOT_OURS


def test_the_recipe_is_accepted(tmp_path):
    write_files(DOCUMENT, tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    make_model(tmp_path / "model", max_length=2048)
    result = CliRunner().invoke(cli, ["check", str(tmp_path / "moved.toml")])
    assert result.exit_code == 0, result.output
    assert "2 update(s)" in result.output
