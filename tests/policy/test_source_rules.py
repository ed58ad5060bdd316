"""Rules for every source file: no stubs, no unbounded files, no undocumented modules, arrays with shape and dtype."""

import ast
import re
import statistics

import pytest

MAX_LINES_OF_A_FILE = 600
MAX_LINES_OF_A_FUNCTION = 60
MAX_MEDIAN_OF_FUNCTIONS = 15


@pytest.fixture(scope="module")
def sources(core_files, torchkit_files, plugin_files):
    """Every module, by its path from the repository's root."""
    assert len(core_files) > 50
    assert len(plugin_files) > 20
    return {path: path.read_text() for path in (*core_files, *torchkit_files, *plugin_files)}


@pytest.fixture(scope="module")
def trees(sources):
    return {path: ast.parse(text) for path, text in sources.items()}


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node):
    """Lines of a function, its docstring left out."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return node.end_lineno - body[0].lineno + 1 if body else 0


def test_nothing_is_a_stub(sources):
    pattern = re.compile(r"NotImplementedError|\b(TODO|FIXME|XXX|HACK)\b")
    found = [f"{path}: {match.group()}" for path, text in sources.items() for match in pattern.finditer(text)]
    assert not found, "\n".join(found)


def test_every_module_says_what_it_is(trees):
    silent = [str(path) for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
    assert not silent, "\n".join(silent)


def test_docstrings_stand_alone(trees):
    """None goes on from the name above it, such as "Of some samples." or "That of one rank."."""
    fragment = re.compile(r"(Of|That of|Those of|The same(?! as))\b")
    found = [
        f"{path}:{node.lineno}: {node.value.value}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and fragment.match(str(node.value.value))
    ]
    assert not found, "\n".join(found)


def test_homes_are_expanded_by_one_function(sources):
    """pathlib's own way ends in a RuntimeError where there is no such user."""
    found = [str(path) for path, text in sources.items() if "expanduser" in text or "Path.home" in text]
    assert [name for name in found if not name.endswith("rlcore/schema/file_limits.py")] == []
    assert len(found) == 1


def test_files_stay_short(sources):
    long = [f"{path}: {count}" for path, text in sources.items() if (count := text.count("\n")) > MAX_LINES_OF_A_FILE]
    assert not long, "\n".join(long)


def test_functions_stay_short(trees):
    long = [
        f"{path}:{node.lineno} {node.name}: {length(node)}"
        for path, tree in trees.items()
        for node in functions(tree)
        if length(node) > MAX_LINES_OF_A_FUNCTION
    ]
    assert not long, "\n".join(long)
    median = statistics.median(length(node) for tree in trees.values() for node in functions(tree))
    assert median <= MAX_MEDIAN_OF_FUNCTIONS


def test_array_fields_of_the_interface_state_their_shape(root):
    """Each field of a record that holds arrays is followed by a docstring with a shape such as [T] or [N+1]."""
    missing, count = [], 0
    for path in sorted((root / "core/src/rlcore/spi").glob("*.py")):
        for record in (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)):
            for statement, following in zip(record.body, [*record.body[1:], None], strict=True):
                if not isinstance(statement, ast.AnnAssign) or not re.search(
                    r"Array\b|Tensor\b", ast.unparse(statement.annotation)
                ):
                    continue
                if re.search(r"NamedTensor|TensorSpec", ast.unparse(statement.annotation)):
                    continue
                count += 1
                text = (
                    following.value.value
                    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                    else ""
                )
                if not re.search(r"\[[A-Za-z+1]+(, [A-Z])*\]|scalar", text):
                    missing.append(f"{path.name}: {record.name}.{statement.target.id}")
    assert count > 20
    assert not missing, "\n".join(missing)
