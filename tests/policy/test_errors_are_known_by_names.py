"""Tests know an error by its class and by the names and values in its message: prose may be written otherwise tomorrow."""

import ast
import re
from pathlib import Path

MAX_WORDS = 4
"""Words of prose in one pattern: lower-case words that belong to no path, key or call."""
WORD = re.compile(r"(?<![\w.`'\\\[/-])[a-z]+(?:'s)?(?![\w.`\]/(=-])")


def patterns(path: Path) -> dict[int, str]:
    """What the file's `match=` look for, by line; of a pattern that is put together, its constant parts."""
    found = {}
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "match=" in text else ():  # parsing all files takes seconds
        if isinstance(node, ast.keyword) and node.arg == "match":
            constants = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            found[node.value.lineno] = " ".join(map(str, constants))
    return found


def test_no_pattern_holds_a_sentence(root: Path) -> None:
    long, count = [], 0
    for path in sorted((root / "tests").rglob("*.py")):
        for line, pattern in patterns(path).items():
            count += 1
            if len(WORD.findall(pattern)) > MAX_WORDS:
                long.append(f"{path}:{line}: {pattern}")
    assert count > 100
    assert not long, "match names, keys and values instead:\n" + "\n".join(long)
