"""No six lines of code stand in two places of the core, torchkit and the plugins."""

import ast
from collections import defaultdict
from pathlib import Path

NUM_LINES = 6
CLOSING = set(")]}, ")


def bare_lines(path: Path) -> list[tuple[int, str]]:
    """The lines that compute, with their numbers: no imports, no docstrings, no comments, no signatures, no closing brackets.

    Signatures may repeat: those of hooks and of a library's callbacks have to."""
    text = path.read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                skipped.update(range(min(part.lineno for part in (node, *node.decorator_list)), node.body[0].lineno))
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [(n, line) for n, line in numbered if n not in skipped and set(line) - CLOSING and not line.startswith("#")]


def test_no_code_stands_in_two_places(core_files: list[Path], torchkit_files: list[Path], plugin_files: list[Path]) -> None:
    places: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in (*core_files, *torchkit_files, *plugin_files):
        lines = bare_lines(path)
        for first in range(len(lines) - NUM_LINES + 1):
            window = lines[first : first + NUM_LINES]
            places[tuple(line for _, line in window)].append(f"{path}:{window[0][0]}")
    assert len(places) > 10_000
    twice = [" and ".join(found) for found in places.values() if len(found) > 1]
    assert not twice, "say it once:\n" + "\n".join(twice)
