"""Fenced blocks of the documents."""

import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("core/*.md"),
        *ROOT.glob("torchkit/*.md"),
        *ROOT.glob("plugins/*/*.md"),
    ]
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# ([\w./-]+\.(?:py|toml|jsonl))")


@frozen(kw_only=True)
class Block:
    """One fenced block."""

    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """The path that a block with a whole file names in its first line."""
        match = _FILE_NAME.fullmatch(self.text.partition("\n")[0])
        return match[1] if match else None


def blocks(document: Path) -> Iterator[Block]:
    for language, text in _BLOCK.findall(document.read_text()):
        yield Block(language=language, text=text)


def anchor_of(heading: str) -> str:
    """What a Markdown viewer calls a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def write_files(document: Path, directory: Path) -> list[Path]:
    """Write every block that names its file below `directory`."""
    written = []
    for block in blocks(document):
        if block.file_name:
            path = directory / block.file_name
            assert path not in written, f"{document.name} has two blocks for {block.file_name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            written.append(path)
    return written
