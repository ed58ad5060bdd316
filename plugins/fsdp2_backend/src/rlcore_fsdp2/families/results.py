"""A file of outcomes, one a line, each with the code that made it."""

import json
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from attrs import asdict

from rlcore_fsdp2.families.outcome import Outcome

_PACKAGES = ("rlcore_fsdp2", "rlcore_torchkit", "rlcore_transformers")


def code_version() -> str:
    """Return the versions of transformers and torch, and when a module of rlcore that computes models last changed."""
    folders = [folder for name in _PACKAGES if (spec := find_spec(name)) for folder in spec.submodule_search_locations or ()]
    changed = max(file.stat().st_mtime for folder in folders for file in Path(folder).rglob("*.py"))
    return f"transformers {version('transformers')}, torch {version('torch')}, {datetime.fromtimestamp(changed, UTC):%F %T}"


def known_outcomes(file: Path, code: str) -> dict[str, Outcome]:
    """Return the sound outcomes that the code of this version wrote to `file`, by model_type; none where there is no file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    entries = [json.loads(line) for line in lines]
    outcomes = [Outcome(**entry["outcome"]) for entry in entries if entry.get("code") == code]
    return {outcome.model_type: outcome for outcome in outcomes if outcome.is_sound}


def add_outcome(file: Path, code: str, outcome: Outcome) -> None:
    """Append an outcome that the code of this version made."""
    with file.open("a", encoding="utf-8") as results:
        results.write(json.dumps({"code": code, "outcome": asdict(outcome)}) + "\n")
