"""The source of modules: what it binds, and what a loss reads in every call."""

import pytest

from rlcore.registry.module_source import columns_read, path_problem

SOURCES = {
    "function": ("def loss(inputs, config): ...", True),
    "class": ("class loss: ...", True),
    "alias": ("from elsewhere import other as loss", True),
    "assigned": ("loss = make()", True),
    "unpacked": ("loss, other = make()", True),
    "below if": ("if True:\n    def loss(inputs, config): ...", True),
    "star": ("from elsewhere import *", True),
    "getattr": ("def __getattr__(name): ...", True),
    "getattr made": ("__getattr__, __dir__ = lazily()", True),
    "made": ("globals()['loss'] = 1", True),
    "made by vars": ("vars()['loss'] = 1", True),
    "made by locals": ("locals().update(loss=1)", True),
    "another module": ("import sys\nsys.modules[__name__] = Lazy()", True),
    "global": ("def make():\n    global loss\n    loss = 1\nmake()", True),
    "matched": ("match make():\n    case loss: ...", True),
    "other": ("def losses(inputs, config): ...", False),
}


@pytest.mark.parametrize(("source", "sound"), SOURCES.values(), ids=SOURCES)
def test_a_function_that_may_be_there_is_no_problem(source, sound, tmp_path, monkeypatch, request):
    module = f"acme_source_{request.node.callspec.id.replace(' ', '_')}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    problem = path_problem(f"{module}:loss")
    assert (problem is None) == sound
    assert sound or problem == f"'{module}:loss', but {module} has no 'loss'; did you mean 'losses'?"


FAULTS = {
    "no module": ("nowhere.deep:loss", "'nowhere.deep:loss', but there is no module 'nowhere'"),
    "no name of a module": ("..:loss", "'..:loss', but there is no module ''"),
    "no module of a package that raises": (
        "acme_pack.deep:loss",
        "'acme_pack.deep:loss', but there is no module 'acme_pack.deep'",
    ),
    "not Python": (
        "acme_broken:loss",
        "'acme_broken:loss', but acme_broken is no Python: '(' was never closed (<unknown>, line 1)",
    ),
    "no path": (3, "3"),
    "a package that raises": ("acme_pack.losses:loss", None),
}


@pytest.mark.parametrize(("path", "problem"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_without_an_import(path, problem, tmp_path, monkeypatch):
    (tmp_path / "acme_pack").mkdir()
    (tmp_path / "acme_pack" / "__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "acme_pack" / "losses.py").write_text("def loss(inputs, config): ...\n")
    (tmp_path / "acme_broken.py").write_text("def loss(\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert path_problem(path) == problem


READS = {
    "constant": ('    x = inputs.token_columns["a"]', {"a"}, set()),
    "own name": ("    return f(inputs.token_columns[OWN])", {"own"}, set()),
    "of the interface": ("    x = inputs.token_columns[spi.VALUES]", {"values"}, set()),
    "sequences": ('    x = inputs.sequence_columns["a"] + inputs.token_columns["b"]', {"b"}, {"a"}),
    "get": ('    x = inputs.token_columns.get("a")', set(), set()),
    "branch": ('    if config.on:\n        x = inputs.token_columns["a"]', set(), set()),
    "either": ('    x = inputs.token_columns["a"] if config.on else 0', set(), set()),
    "later": ('    if config.on:\n        return 0\n    x = inputs.token_columns["a"]', set(), set()),
    "returned before": ('    return 0\n    x = inputs.token_columns["a"]', set(), set()),
    "written": ('    inputs.token_columns["a"] = 0', set(), set()),
    "suppressed": ('    with contextlib.suppress(KeyError):\n        x = inputs.token_columns["a"]', set(), set()),
    "within with": ('    with torch.no_grad():\n        x = inputs.token_columns["a"]', {"a"}, set()),
    "inner": ('    def f():\n        y = inputs.token_columns["a"]', set(), set()),
    "each": ('    x = [inputs.token_columns["a"] for _ in config.all]', set(), set()),
    "unknown name": ("    x = inputs.token_columns[name_of(config)]", set(), set()),
}


@pytest.mark.parametrize(("body", "token", "sequence"), READS.values(), ids=READS)
def test_only_what_every_call_reads_counts(body, token, sequence, tmp_path, monkeypatch, request):
    module = f"acme_reads_{request.node.callspec.id.replace(' ', '_')}"
    (tmp_path / f"{module}.py").write_text(f'from rlcore import spi\nOWN = "own"\n\ndef loss(inputs, config):\n{body}\n')
    monkeypatch.syspath_prepend(tmp_path)
    found = columns_read(f"{module}:loss")
    assert (found.token, found.sequence) == (token, sequence)
