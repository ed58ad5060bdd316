"""The tables of docs/importing.md are the code's, and every key in them is read by the code."""

import re
from pathlib import Path

import pytest

from rlcore_import import nemo_rl_keys, verl_keys

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "plugins" / "recipe_import" / "src" / "rlcore_import"
TABLES = {"NeMo-RL": nemo_rl_keys.MAPPED, "verl": verl_keys.MAPPED}


@pytest.mark.parametrize("library", TABLES)
def test_the_table_of_keys_is_the_codes(library: str) -> None:
    document = (ROOT / "docs" / "importing.md").read_text()
    part = document[document.index(f"## {library}'s keys") :].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", part, re.MULTILINE)
    assert rows == [(key, meaning.replace("|", "\\|")) for key, meaning in TABLES[library].items()]


@pytest.mark.parametrize("library", TABLES)
def test_every_key_of_the_table_is_read(library: str) -> None:
    prefix = "nemo_rl" if library == "NeMo-RL" else "verl"
    texts = [
        file.read_text()
        for file in SOURCES.glob("*.py")
        if file.stem.startswith((prefix, "optimizers")) and not file.stem.endswith(("keys", "rows"))
    ]
    text = "\n".join((*texts, *verl_keys.LIKE_THE_POLICY))  # which verl_advantages reads, one by one
    names = {
        key.rpartition(".")[2].removeprefix("val_").replace("beta1", "beta").replace("beta2", "beta") for key in TABLES[library]
    }
    assert sorted(name for name in names if not re.search(rf"\b(val_)?{re.escape(name)}(\b|\{{)", text)) == []
