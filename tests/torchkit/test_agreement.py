"""What fails on one rank fails on all, with the first rank's error; the other ranks' answers are played."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from attrs import frozen

from rlcore.spi import ConfigError, ContractError, Problem, RlcoreError, StorageError
from rlcore_torchkit.distributed.agreement import first_rank, together

PROBLEMS = (Problem(path="a", found="b", expected="c"), Problem(path="d", found="e", expected="f"))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fail(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("run", [together, first_rank])
def test_a_process_without_a_group_is_the_only_rank(run: Any) -> None:
    assert run(lambda: 4) == 4
    with pytest.raises(StorageError, match="no space"):
        run(lambda: fail(StorageError("no space")))


@pytest.mark.usefixtures("one_rank")
def test_what_succeeds_everywhere_gives_each_rank_its_own_result() -> None:
    assert together(lambda: 3) == 3
    assert first_rank(lambda: {"a": 1}) == {"a": 1}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("run", [together, first_rank])
def test_errors_of_the_interface_keep_class_and_content(run: Any) -> None:
    with pytest.raises(StorageError, match="no space"):
        run(lambda: fail(StorageError("no space")))
    with pytest.raises(ConfigError) as raised:
        run(lambda: fail(ConfigError(PROBLEMS)))
    assert raised.value.problems == PROBLEMS


@pytest.mark.usefixtures("one_rank")
def test_any_other_error_is_told_to_all_too() -> None:
    with pytest.raises(RlcoreError, match=r"rank \d: ZeroDivisionError"):
        together(lambda: 1 // 0)


@frozen
class Played:
    """Three ranks of which this is the second: what `all_gather_object` finds on the others."""

    before: Any
    after: Any

    def gather(self, found: list[Any], own: Any) -> None:
        found[:] = [self.before, own, self.after]


@pytest.mark.usefixtures("one_rank")
def test_the_first_ranks_error_is_everyones(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, full = (ContractError, "refused"), (StorageError, "full")
    for played, own, expected in (
        (Played(None, full), lambda: 1, StorageError),
        (Played(refused, full), lambda: 1, ContractError),
        (Played(refused, None), lambda: fail(StorageError("mine")), ContractError),
        (Played(None, full), lambda: fail(ConfigError(PROBLEMS)), ConfigError),
    ):
        monkeypatch.setattr(dist, "all_gather_object", played.gather)
        with pytest.raises(expected):
            together(own)
