"""The program of docs/design.md trains on the inner ring."""

import json

from markdown_blocks import ROOT, blocks


def test_the_inner_ring_trains_by_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = (block.text for block in blocks(ROOT / "docs" / "design.md") if block.language == "python")
    names = {}
    exec(program, names)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps][-1] == names["recipe"].run.num_steps
