"""read_raw: files, what they extend, overrides, paths, and where each value is from."""

from pathlib import Path

import pytest

from rlcore.config.load import raw_from, read_raw
from rlcore.spi import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_raw(path, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_tables_merge_and_everything_else_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", '[run]\nname = "base"\nseed = 1\n[rollout]\nstop_strings = ["a", "b"]\n[trainer.x]\na = 1')
    path = write(
        tmp_path / "r.toml", 'extends = "base.toml"\n[run]\nseed = 2\n[rollout]\nstop_strings = ["c"]\n[trainer.x]\nb = 2'
    )
    assert read_raw(path, ()).values == {
        "run": {"name": "base", "seed": 2},
        "rollout": {"stop_strings": ["c"]},
        "trainer": {"x": {"a": 1, "b": 2}},
    }


def test_extends_is_relative_to_its_file_and_goes_in_order(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "root.toml", "a.x = 1\na.y = 1\na.z = 1")
    write(tmp_path / "deep" / "one.toml", 'extends = "root.toml"\na.y = 2')
    write(tmp_path / "two.toml", "a.z = 3\na.y = 3")
    path = write(tmp_path / "r.toml", 'extends = ["deep/one.toml", "two.toml"]\na.w = 4')
    assert read_raw(path, ()).values == {"a": {"x": 1, "y": 3, "z": 3, "w": 4}}


def test_a_shared_base_is_no_cycle(tmp_path: Path) -> None:
    write(tmp_path / "root.toml", "a = 1")
    write(tmp_path / "one.toml", 'extends = "root.toml"')
    write(tmp_path / "two.toml", 'extends = "root.toml"')
    path = write(tmp_path / "r.toml", 'extends = ["one.toml", "two.toml"]')
    assert read_raw(path, ()).values == {"a": 1}


def test_a_cycle_names_its_files(tmp_path: Path) -> None:
    path = write(tmp_path / "one.toml", 'extends = "two.toml"')
    write(tmp_path / "two.toml", 'extends = "one.toml"')
    (text,) = problems_of(path)
    assert "a cycle" in text
    assert text.count("one.toml") >= 2
    assert "two.toml" in text


def test_missing_files_are_all_named_with_a_suggestion(tmp_path: Path) -> None:
    write(tmp_path / "common.toml", "")
    path = write(tmp_path / "r.toml", 'extends = ["comon.toml", "nowhere/x.toml"]')
    first, second = problems_of(path)
    assert "r.toml extends it" in first
    assert f"Did you mean {tmp_path / 'common.toml'}?" in first
    assert "does not exist" in second


@pytest.mark.parametrize("extends", ["3", "[1]", "{a = 1}", "true"])
def test_extends_of_a_wrong_type(tmp_path: Path, extends: str) -> None:
    (text,) = problems_of(write(tmp_path / "r.toml", f"extends = {extends}"))
    assert "a file's name, or an array of them" in text


def test_a_syntax_error_names_file_and_line_and_shows_it(tmp_path: Path) -> None:
    (text,) = problems_of(write(tmp_path / "r.toml", "[run]\nseed = 1\nname = demo\n"))
    assert "r.toml:3:" in text
    assert "`name = demo`" in text


def test_a_syntax_error_at_the_end(tmp_path: Path) -> None:
    (text,) = problems_of(write(tmp_path / "r.toml", 'a = """never closed'))
    assert "r.toml:1:20:" in text


@pytest.mark.parametrize(("content", "expected"), [(b"\xff\xfe\x00", "UTF-8"), (None, "is a directory")])
def test_what_is_no_text_file(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "r.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    (text,) = problems_of(path)
    assert expected in text


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1")
    assert read_raw(path, ()).values == {"a": 1}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a.b=5", 5),
        ("a.b = 5", 5),
        ("a.b=1e-6", 1e-6),
        ("a.b=true", True),
        ('a.b=["x", "y"]', ["x", "y"]),
        ("a.b={c = 1}", {"c": 1}),
        ('a.b="5"', "5"),
        ("a.b=./dir", "./dir"),
        ("a.b=Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("a.b=x=y", "x=y"),
        ("a.b=#1", "#1"),
        ("a.b=", ""),
        ("a.b=two words", "two words"),
        ("a.b=1\nc=2", "1\nc=2"),
    ],
)
def test_override_values_are_toml_or_else_strings(tmp_path: Path, override: str, value: object) -> None:
    assert read_raw(write(tmp_path / "r.toml", "a.b = 0"), [override]).values == {"a": {"b": value}}


def test_later_overrides_win_and_make_tables(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "a = 1")
    raw = read_raw(path, ["a.b.c=1", "a.b.c=2", "a.b.d=3", 'x."quoted.key"=4'])
    assert raw.values == {"a": {"b": {"c": 2, "d": 3}}, "x": {"quoted.key": 4}}


@pytest.mark.parametrize("override", ["seed", "=5", "a b=1", "a.=1", "#a=1", "a=[1", 'a="x', "a={", "extends=x.toml", "a\nb=1"])
def test_malformed_overrides_are_problems(tmp_path: Path, override: str) -> None:
    path = write(tmp_path / "r.toml", "")
    (text,) = problems_of(path, override)
    assert override in text


def test_every_bad_override_and_file_is_reported_at_once(tmp_path: Path) -> None:
    assert len(problems_of(tmp_path / "missing.toml", "a", "b=[")) == 3


def test_origins_name_the_last_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "base.toml", "run.seed = 1\nrun.name = 'a'\ntrainer.x = 1\n[data]\n")
    path = write(tmp_path / "r.toml", 'extends = "base.toml"\nrun.seed = 2\ndata.train.limit = 3')
    raw = read_raw(path, ["trainer.x.y=1"])
    assert raw.origin(("run", "seed")) == "r.toml"
    assert raw.origin(("run", "name")) == "base.toml"
    assert raw.origin(("trainer", "x", "y")) == "the command line"
    assert raw.origin(("trainer", "x")) == "the command line"
    assert raw.origin(("data",)) == "r.toml"
    assert raw.origin(("model", "path")) is None


def test_paths_in_a_file_start_from_it_where_they_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "recipes" / "base.toml", '[model]\npath = "model"\n[data.train]\nsource = "jsonl"\npath = "rows.jsonl"')
    path = write(
        tmp_path / "r.toml", 'extends = "recipes/base.toml"\n[data.evaluation]\nsource = "huggingface"\npath = "org/set"'
    )
    values = read_raw(path, ()).values
    assert values["model"]["path"] == str(tmp_path / "recipes" / "model")
    assert values["data"]["train"]["path"] == str(tmp_path / "recipes" / "rows.jsonl"), "a file, though it does not exist yet"
    assert values["data"]["evaluation"]["path"] == "org/set", "a name on the Hub"


def test_paths_on_the_command_line_start_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    (tmp_path / "recipes" / "model").mkdir(parents=True)
    path = write(tmp_path / "recipes" / "r.toml", 'model.path = "model"')
    monkeypatch.chdir(tmp_path / "here")
    assert read_raw(path, ["model.path=model"]).values["model"]["path"] == str(tmp_path / "here" / "model")
    assert read_raw(path, ["model.path=../gone"]).values["model"]["path"] == str(tmp_path / "gone")
    assert read_raw(path, ["model.path=Qwen/Qwen3-0.6B"]).values["model"]["path"] == "Qwen/Qwen3-0.6B"
    assert read_raw(path, ["lora.init_from=gone"]).values["lora"]["init_from"] == str(tmp_path / "here" / "gone")


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path / "r.toml", 'model.path = "~/model"')
    assert read_raw(path, ()).values["model"]["path"] == str(tmp_path / "model")


def test_a_home_that_is_not_known_is_left_to_the_converter(tmp_path: Path) -> None:
    nowhere = "~no-such-user/x"
    keys = ("model.path", "lora.init_from", "data.train.path")
    text = "".join(f'{key} = "{nowhere}"\n' for key in keys)
    path = write(tmp_path / "r.toml", text)
    values = read_raw(path, ()).values
    assert values["model"]["path"] == values["lora"]["init_from"] == values["data"]["train"]["path"] == nowhere


def test_a_recipe_in_a_home_that_is_not_known_cannot_be_read(tmp_path: Path) -> None:
    (text,) = problems_of(Path("~no-such-user/r.toml"))
    assert text.startswith("~no-such-user/r.toml: found no such file")
    (text,) = problems_of(write(tmp_path / "r.toml", 'extends = "~no-such-user/base.toml"'))
    assert "~no-such-user/base.toml: found no such file" in text


@pytest.mark.parametrize("text", ["model = 3", "model.path = 3", "data.train = 'x'", "model.path = ''", "data = []"])
def test_odd_shapes_are_left_to_the_converter(tmp_path: Path, text: str) -> None:
    assert read_raw(write(tmp_path / "r.toml", text), ()).values


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 10**4 + "]" * 10**4, ".".join(["a"] * 10**4) + " = 1", 'extends = "a\\u0000b"', "run.directory = '\0'"],
    ids=["lists", "keys", "NUL in extends", "NUL"],
)
def test_what_no_recipe_holds_is_a_problem(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"recipe\.toml"):
        read_raw(tmp_path / "recipe.toml", ())


@pytest.mark.parametrize("override", ["a=" + "[" * 10**4 + "]" * 10**4, ".".join(["a"] * 10**4) + "=1"], ids=["lists", "keys"])
def test_an_override_that_is_too_deep_is_a_problem(override: str) -> None:
    with pytest.raises(ConfigError):
        raw_from({}, [override])


@pytest.mark.parametrize("key", ["run.directory", "run.name", "model.path", "data.train.path"])
def test_a_path_with_nul_is_a_problem(load, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load("", f'{key}="a\\u0000b"')
