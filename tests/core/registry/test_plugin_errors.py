"""Whose an error is, and what a plugin may not do."""

import signal

import pytest

from rlcore.registry.plugin_errors import (
    attributed,
    exit_error,
    first_line,
    is_fatal_to_process,
    is_outside,
    listing_error,
    owner_of,
    register_fatal_error,
    set_error_owner,
)
from rlcore.spi import PluginError


class Ordered(SystemExit):
    """With which an execution ends a worker."""


def is_end(error: BaseException) -> bool:
    return isinstance(error, Ordered)


register_fatal_error(is_end)  # as a worker process of that execution says


class Wordless(Exception):
    def __init__(self, failure: BaseException) -> None:
        self.failure = failure

    def __str__(self) -> str:
        raise self.failure


def test_every_problem_has_a_line() -> None:
    assert str(listing_error("2 plugins", ["a", "b"])) == "2 plugins:\n  - a\n  - b"


def test_what_came_from_outside_is_ctrl_c_or_the_end_that_an_execution_orders() -> None:
    errors = [KeyboardInterrupt(), Ordered(), SystemExit(0), GeneratorExit(), ValueError()]
    assert [is_outside(error) for error in errors] == [True, True, False, False, False]
    assert [is_fatal_to_process(error) for error in errors] == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "a"),
        (ValueError(), "ValueError"),
        (ValueError("\nb"), "ValueError"),
        (Wordless(KeyError()), "<its text raises KeyError>"),
        (
            Wordless(KeyboardInterrupt()),
            f"<the text of an error raised KeyboardInterrupt without Ctrl-C (in {__name__}, line 37)>",
        ),
    ],
)
def test_an_error_has_a_first_line_whatever_its_text_does(error: Exception, line: str) -> None:
    assert first_line(error) == line


class Interrupting(Exception):
    def __str__(self) -> str:
        signal.raise_signal(signal.SIGINT)
        return "whole"


def test_ctrl_c_while_an_error_is_put_into_words_is_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt):
        first_line(Interrupting())


class Panic(BaseException):
    """As libraries in Rust raise."""


@pytest.mark.parametrize("error", [ValueError("no"), Panic("index")])
def test_an_error_of_a_plugin_passes_with_its_owner_and_what_it_was_doing(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, attributed("raised by the check of", "generator 'acme'"):
        raise error
    assert raised.value is error
    assert owner_of(error) == "generator 'acme'"
    assert error.__notes__ == ["raised by the check of generator 'acme'"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Ordered()])
def test_what_came_from_outside_is_nobodys(error: BaseException) -> None:
    with pytest.raises(type(error)), attributed("raised by the check of", "generator 'acme'"):
        raise error
    assert owner_of(error) is None


def test_a_plugin_that_ends_the_process_has_failed() -> None:
    with pytest.raises(PluginError) as raised, attributed("raised by the check of", "generator 'acme'"):
        raise SystemExit(0)
    assert isinstance(raised.value.__cause__, SystemExit)
    assert str(raised.value).startswith(f"raised by the check of generator 'acme': found SystemExit(0) in {__name__}, line ")


def test_an_error_of_a_plugin_that_another_one_calls_stays_its_own() -> None:
    error = ValueError("no")
    with (
        pytest.raises(ValueError, match="no"),
        attributed("raised by", "collector 'b'"),
        attributed("raised by", "generator 'a'"),
    ):
        raise error
    assert owner_of(error) == "generator 'a'"
    assert error.__notes__ == ["raised by generator 'a'"]


def test_an_exit_that_was_never_raised_has_no_place() -> None:
    assert "found SystemExit('no'), which" in str(exit_error("build", SystemExit("no")))


def test_the_last_owner_counts() -> None:
    error = ValueError()
    assert owner_of(error) is None
    set_error_owner(error, "one")
    set_error_owner(error, "other")
    assert owner_of(error) == "other"
