"""Every error ends in one clear message on stderr and a documented exit code."""

import re
from pathlib import Path

import pytest

from rlcore.cli.errors import INTERRUPTED, UNEXPECTED
from rlcore.registry.plugin_errors import attributed
from rlcore.spi import errors
from rlcore.spi.errors import Problem, ProblemsError, RlcoreError

DOCS = Path(__file__).parents[3] / "docs" / "cli.md"


def error_classes() -> list[type[RlcoreError]]:
    found = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RlcoreError)]
    return [cls for cls in found if cls is not ProblemsError]


def make(cls: type[RlcoreError]) -> RlcoreError:
    if issubclass(cls, ProblemsError):
        return cls([Problem(path="some.key", found="this", expected="that", remedy="Do so.")])
    return cls("what happened, and what to do")


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_an_error_ends_in_its_message_and_code(invoke, calls, cls: type[RlcoreError]) -> None:
    error = make(cls)

    def fail() -> None:
        raise error

    calls.on_prepare = fail
    result = invoke("check", "r.toml")
    assert result.exit_code == cls.exit_code
    assert result.stderr == f"error: {error}\n"
    assert result.stdout == ""


def test_notes_follow_the_message(invoke, calls) -> None:
    def fail() -> None:
        error = errors.NonFiniteError("the loss is nan")
        error.add_note("raised in train_step of trainer 'x'")
        raise error

    calls.on_prepare = fail
    assert invoke("check", "r.toml").stderr == "error: the loss is nan\n  raised in train_step of trainer 'x'\n"


def test_exit_codes_are_documented_and_each_means_one_thing() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \| (?:`(\w+)`)? ?\|$", DOCS.read_text(), re.MULTILINE)
    documented = {int(code): name for code, name in rows}
    assert len(documented) == len(rows)
    raised = {cls.exit_code: cls.__name__ for cls in error_classes()}
    assert len(raised) == len(error_classes())
    assert documented == {0: "", UNEXPECTED: "", **raised}
    assert INTERRUPTED in documented


@pytest.mark.parametrize("how", [["--debug", "check"], ["check"]])
def test_a_traceback_is_shown_on_request_alone(invoke, calls, monkeypatch, how: list[str]) -> None:
    def fail() -> None:
        raise errors.DataError("no rows")

    calls.on_prepare = fail
    assert ("Traceback" in invoke(*how, "r.toml").stderr) == (how[0] == "--debug")
    monkeypatch.setenv("RLCORE_DEBUG", "1")
    assert "Traceback" in invoke("check", "r.toml").stderr


def test_a_failed_import_names_the_command_that_looks_for_the_cause(invoke, calls, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail() -> None:
        raise ImportError("no module of numpy's")

    calls.on_prepare = fail
    result = invoke("check", "r.toml")
    assert result.exit_code == UNEXPECTED
    assert "unexpected ImportError: no module of numpy's. `rlcore doctor` lists packages" in result.stderr


def test_the_unforeseen_names_the_file_with_its_traceback(invoke, calls, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail() -> None:
        raise ZeroDivisionError("by nothing")

    calls.on_prepare = fail
    result = invoke("check", "r.toml")
    assert result.exit_code == UNEXPECTED
    assert "unexpected ZeroDivisionError: by nothing" in result.stderr
    assert "Traceback" not in result.stderr
    (file,) = tmp_path.glob("traceback-*.txt")
    assert str(file) in result.stderr
    assert "ZeroDivisionError: by nothing" in file.read_text()
    debugged = invoke("--debug", "check", "r.toml")
    assert "Traceback" in debugged.stderr
    assert len(list(tmp_path.glob("traceback-*.txt"))) == 1


@pytest.mark.parametrize(
    "arguments", [("environment.mine.api_key=short7",), ("--api-key", "short7"), ("--api-key=short7",)], ids=lambda one: one[0]
)
def test_a_secret_of_the_command_line_stands_in_no_traceback(
    invoke, calls, monkeypatch, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["rlcore", "check", "r.toml", *arguments])

    def fail() -> None:
        raise ZeroDivisionError("by short7 with http://user:word@host")

    calls.on_prepare = fail
    said = [invoke("check", "r.toml").stderr, invoke("--debug", "check", "r.toml").stderr]
    (file,) = tmp_path.glob("traceback-*.txt")
    for text in (*said, file.read_text()):
        assert "by *** with http://***@host" in text
        assert "short7" not in text
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_an_observer_raises_is_said_to_be_its_own(invoke, calls, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail() -> None:
        with attributed("raised while building observer 'watch' (acme 1.0)", owner="observer 'watch' (acme 1.0)"):
            raise ConnectionError("no tracker")

    calls.on_prepare = fail
    result = invoke("check", "r.toml")
    assert result.exit_code == UNEXPECTED
    said = "unexpected ConnectionError: no tracker. It comes from observer 'watch' (acme 1.0), or from a library that it uses."
    assert said in result.stderr
    assert "defect" not in result.stderr
    assert "traceback-" in result.stderr


def test_the_traceback_of_a_run_lies_in_its_directory(invoke, calls, tmp_path: Path) -> None:
    def fail(progress) -> None:
        progress.started(tmp_path, 0, 3)
        raise ZeroDivisionError

    calls.on_train = fail
    result = invoke("train", "r.toml")
    assert result.exit_code == UNEXPECTED
    (file,) = tmp_path.glob("traceback-*.txt")
    assert str(file) in result.stderr
    assert "--resume continues" in result.stderr


def test_nowhere_to_write_the_traceback(invoke, calls, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))

    def fail() -> None:
        raise ZeroDivisionError

    calls.on_prepare = fail
    assert "Run again as `rlcore --debug ...`" in invoke("check", "r.toml").stderr


def test_ctrl_c_outside_a_run(invoke, calls) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    calls.on_prepare = interrupt
    result = invoke("check", "r.toml")
    assert result.exit_code == INTERRUPTED
    assert result.stderr == "error: interrupted\n"


@pytest.mark.parametrize("arguments", [["tran", "r.toml"], ["train"], ["train", "r.toml", "--resmue"], ["plugins", "x"]])
def test_a_wrong_command_line(invoke, arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr


def test_a_recipe_that_is_not_there(invoke, tmp_path: Path) -> None:
    for command in ("train", "check", "eval", "config"):
        result = invoke(command, str(tmp_path / "none.toml"))
        assert result.exit_code == 2
        assert "no such file" in result.stderr


def test_no_color_is_respected(invoke, calls, monkeypatch) -> None:
    def fail() -> None:
        raise errors.DataError("no rows")

    calls.on_prepare = fail
    assert "\x1b[" in invoke("check", "r.toml", color=True).stderr
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in invoke("check", "r.toml", color=True).stderr


def test_what_would_end_the_process_in_silence_is_an_error(invoke, calls, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def leave() -> None:
        raise SystemExit(0)

    calls.on_prepare = leave
    result = invoke("check", "r.toml")
    assert result.exit_code == UNEXPECTED
    assert "unexpected SystemExit(0), which would have ended the process in silence" in result.stderr
    assert invoke("check", "--help").exit_code == 0


def test_a_panic_outside_python_is_an_error_like_any_other(invoke, calls, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class PanicException(BaseException):
        """As the bindings of libraries in Rust raise it."""

    def panic() -> None:
        raise PanicException("index out of bounds")

    calls.on_prepare = panic
    result = invoke("check", "r.toml")
    assert result.exit_code == UNEXPECTED
    assert "unexpected PanicException: index out of bounds" in result.stderr


def test_an_error_without_a_text_is_an_error_like_any_other(invoke, calls, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class WordlessError(Exception):
        def __str__(self) -> str:
            raise KeyError("host")

    def fail() -> None:
        raise WordlessError

    calls.on_prepare = fail
    result = invoke("check", "r.toml")
    assert result.exit_code == UNEXPECTED
    assert "unexpected WordlessError: <its text raises KeyError>" in result.stderr
    (file,) = tmp_path.glob("traceback-*.txt")
    assert "WordlessError" in file.read_text()
