"""Kinds of failure by errors: by the block that they leave, by their cause, or by their class."""

import asyncio

import pytest

from rlcore.spi import ContractError, EpisodeFailure, RewardError, fails_as, failure_kind


class APIConnectionError(Exception):
    """Has the name of openai's."""


class ReadTimeout(APIConnectionError):
    """Is one of them."""


def left(*kinds, error):
    """The kind of an error that leaves blocks, the innermost one first."""
    try:
        raise_in(list(kinds), error)
    except BaseException as raised:
        return failure_kind(raised)


def raise_in(kinds, error):
    if not kinds:
        raise error
    with fails_as(kinds.pop()):
        raise_in(kinds, error)


def test_the_innermost_block_says_the_kind():
    assert left("tool", error=ValueError()) == "tool"
    assert left("grader", "environment", error=ValueError()) == "grader"


def test_a_cancellation_is_told_by_the_block_that_it_leaves():
    async def cancelled():
        async def wait():
            with fails_as("grader"):
                await asyncio.sleep(60)

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError as error:
            return failure_kind(error)

    assert asyncio.run(cancelled()) == "grader"


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(), BrokenPipeError(), TimeoutError(), MemoryError(), APIConnectionError(), ReadTimeout()]
)
def test_lost_connections_and_expired_times_are_of_the_infrastructure(error):
    assert failure_kind(error) == "infrastructure"
    assert left("tool", error=type(error)()) == "tool"


def test_an_error_that_was_raised_from_another_has_its_kind():
    error = RewardError("no judge")
    error.__cause__ = ConnectionResetError("gone")
    assert failure_kind(error) == "infrastructure"


@pytest.mark.parametrize("error", [KeyError("answer"), FileNotFoundError(), RewardError("no number"), SystemExit(1)])
def test_everything_else_is_the_environments(error):
    assert failure_kind(error) == "environment"


def test_an_unknown_kind_is_refused_with_those_that_there_are():
    with (
        pytest.raises(ContractError, match="'weather'.*infrastructure, limit"),
        fails_as("weather"),
    ):
        pass


@pytest.mark.parametrize(
    ("kind", "masked", "is_trained"),
    [
        ("policy", False, True),
        ("limit", False, True),
        ("policy", True, False),
        ("limit", True, False),
        *((kind, False, False) for kind in ("environment", "grader", "tool", "infrastructure")),
    ],
)
def test_only_the_policy_and_limits_are_trained_on(kind, masked, is_trained):
    assert EpisodeFailure(kind=kind, masked=masked).is_trained is is_trained
