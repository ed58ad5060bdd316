"""The program of docs/tinker.md runs as it stands, and trains."""

import runpy
from pathlib import Path

import pytest
from tinker_server import KEY, serving

from rlcore_torchkit.testing.models import make_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "tinker.md"


def test_the_program_learns_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tinker", reason="needs the client: pip install tinker")
    (program,) = DOCUMENT.read_text().split("```python\n")[1:]
    path = tmp_path / "program.py"
    path.write_text(program.partition("```")[0])
    with serving(tmp_path / "served", make_model(tmp_path / "model"), lora={"rank": 32}) as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        losses = runpy.run_path(str(path))["losses"]
    assert losses[-1] < 0.8 * losses[0]
