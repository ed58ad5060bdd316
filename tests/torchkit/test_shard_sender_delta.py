"""Refits by changes alone, in threads: what travels, to whom, and what catches a change that is lost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from attrs import define, evolve
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rlcore.spi import RefitError, ShardExport, ShardRoute, ShardSlice, TensorSpec
from rlcore_torchkit.refit import shard_transfer
from rlcore_torchkit.refit.shard_cache import ShardCache
from rlcore_torchkit.refit.shard_route import ShardEnd, whole_slice
from rlcore_torchkit.refit.shard_sender import ShardSender

from .shard_threads import CPU, REQUEST, end_of, route_in, store, together  # type: ignore[import-not-found]

SPECS = tuple(
    TensorSpec(name=name, shape=(64, 32), dtype=dtype)
    for name, dtype in (("a", "bfloat16"), ("b", "float32"), ("c", "bfloat16"))
)
WHOLE = tuple(map(whole_slice, SPECS))
MAX_BYTES = 2**14
WHOLE_BYTES = sum(64 * 32 * (4 if spec.dtype == "float32" else 2) for spec in SPECS)
ONE_CHANGE = 3 * (16 + 8 + 8 + 8 + 16)
"""More than the messages of one change take, of at most 3 buckets."""


@define
class Receiver:
    """A generator's one rank."""

    route: ShardRoute
    kept: ShardCache
    end: ShardEnd | None = None

    def take(self, shards: ShardExport, version: int, only_changed: bool = False) -> tuple[dict[str, Tensor], int]:
        """What is loaded, and the digest."""
        if self.end is None:
            self.end = end_of(self.route, shards.held, SPECS, max_bytes=MAX_BYTES)
        loaded: dict[str, Tensor] = {}

        def load(parts: Sequence[tuple[TensorSpec, ShardSlice, Tensor]]) -> None:
            loaded.update({spec.name: tensor.clone() for spec, _, tensor in parts})

        digest = self.end.take(load, kept=self.kept, weight_version=version, only_changed=only_changed)
        return loaded, digest


class Pair:
    """A trainer and a generator, each of one rank."""

    def __init__(self, at: TCPStore) -> None:
        self.at, self.sender, self.receivers = at, ShardSender(0, 1, CPU), list[Receiver]()
        self.add()

    def add(self) -> None:
        """A generator in the place of the one before."""
        self.receivers.append(Receiver(route_in(self.at, [WHOLE], name=f"engine-{len(self.receivers)}"), ShardCache(CPU)))

    def refit(self, weights: Mapping[str, Tensor], version: int, only_changed: bool = False) -> tuple[list[Any], int]:
        """What is loaded or raised at the sender's end and the receiver's, and the bytes sent."""
        request, receiver = (
            evolve(REQUEST, weight_version=version, max_bucket_bytes=MAX_BYTES, delta="device"),
            self.receivers[-1],
        )

        def read(specs: Sequence[TensorSpec]) -> dict[ShardSlice, Tensor]:
            return {whole_slice(spec): weights[spec.name] for spec in specs}

        export = self.sender.export(request, SPECS, WHOLE, read)
        assert export.shards is not None
        export.shards.route = receiver.route
        results = together(lambda: list(export.buckets), partial(receiver.take, export.shards, version, only_changed))
        if not isinstance(results[1], BaseException):
            results[1], digest = results[1]
            assert digest == export.shards.digest
        return results, export.shards.sent_bytes or 0

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers:
            if receiver.end is not None:
                receiver.end.group.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        made = Pair(store())
        stack.callback(made.close)
        yield made


def weights_of(seed: int) -> dict[str, Tensor]:
    """In float32, as masters are; the export casts them."""
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}


def assert_equal(found: Mapping[str, Tensor], weights: Mapping[str, Tensor], names: Sequence[str] = ("a", "b", "c")) -> None:
    assert [*found] == [*names]
    for spec in SPECS:
        assert spec.name not in names or torch.equal(found[spec.name], weights[spec.name].to(getattr(torch, spec.dtype)))


def test_only_what_has_changed_travels(pair: Pair) -> None:
    weights = weights_of(1)
    (_, found), sent = pair.refit(weights, 0)
    assert_equal(found, weights)
    assert WHOLE_BYTES < sent < WHOLE_BYTES + 200
    for version in (1, 2, 3):
        weights["a"][version, 5] += 1.0
        weights["b"][0, 0] += 1e-3
        weights["c"][3, 3] *= 1 + 1e-6  # less than bfloat16 tells
        (_, found), sent = pair.refit(weights, version, only_changed=version == 3)
        assert_equal(found, weights, ("a", "b") if version == 3 else ("a", "b", "c"))
        assert sent < ONE_CHANGE
    (_, found), sent = pair.refit(weights, 4, only_changed=True)
    assert found == {}
    (_, found), sent = pair.refit(weights_of(1), 5)
    assert_equal(found, weights_of(1))
    assert sent < 2 * ONE_CHANGE, "back to what it was at first"
    others = weights_of(2)
    (_, found), sent = pair.refit(others, 6, only_changed=True)
    assert_equal(found, others)
    assert WHOLE_BYTES < sent < WHOLE_BYTES + 200, "whole is less than a code of everything"


def assert_same_bits(found: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    assert [*found] == [spec.name for spec in SPECS]
    for spec in SPECS:
        expected = weights[spec.name].contiguous().to(getattr(torch, spec.dtype))
        assert torch.equal(found[spec.name].view(torch.uint8), expected.view(torch.uint8))


def test_nan_and_the_sign_of_zero_travel_by_their_bits(pair: Pair) -> None:
    weights = weights_of(1)
    for tensor in weights.values():
        tensor[:8], tensor[8:16] = float("nan"), 0.0
    (_, found), _ = pair.refit(weights, 0)
    assert_same_bits(found, weights)
    (_, found), sent = pair.refit(weights, 1, only_changed=True)
    assert found == {}
    assert sent < ONE_CHANGE, "NaN is what it was"
    for tensor in weights.values():
        tensor[9, 3] = -0.0
        tensor[20, 3] = float("nan")
    weights["b"].view(torch.int32)[3, 3] += 5  # another NaN
    weights["b"][7, 7] = 1.0
    (_, found), sent = pair.refit(weights, 2, only_changed=True)
    assert_same_bits(found, weights)
    assert sent < 2 * ONE_CHANGE


@pytest.mark.parametrize("is_new", [True, False])
def test_a_receiver_that_is_new_or_holds_another_version_gets_all(pair: Pair, is_new: bool) -> None:
    weights = weights_of(1)
    pair.refit(weights, 0)
    weights["a"][0, 0] += 1.0
    if is_new:
        pair.add()
    else:
        pair.receivers[0].kept.version = 7
    (_, found), sent = pair.refit(weights, 1)
    assert_equal(found, weights)
    assert sent > WHOLE_BYTES
    weights["a"][0, 0] += 1.0
    (_, found), sent = pair.refit(weights, 2)
    assert_equal(found, weights)
    assert sent < ONE_CHANGE


def without_a_word(encode: Callable[[Tensor, Tensor], Tensor | None], new: Tensor, old: Tensor) -> Tensor | None:
    """The code of what has changed but for the last word."""
    words = (new.view(torch.int16) != old.view(torch.int16)).nonzero()
    if len(words):
        new = new.clone()
        new.view(torch.int16)[words[-1]] = old.view(torch.int16)[words[-1]]
    return encode(new, old)


def cut_off(encode: Callable[[Tensor, Tensor], Tensor | None], new: Tensor, old: Tensor) -> Tensor | None:
    code = encode(new, old)
    return None if code is None else code[:-8]


@pytest.mark.parametrize("fault", [without_a_word, cut_off])
def test_a_lost_change_is_an_error_and_the_next_refit_is_whole(
    pair: Pair, fault: Callable[..., Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(1)
    pair.refit(weights, 0)
    weights["a"][0, 0] += 1.0
    with monkeypatch.context() as patched:
        patched.setattr(shard_transfer, "encode", partial(fault, shard_transfer.encode))
        (_, error), _ = pair.refit(weights, 1)
    assert isinstance(error, RefitError)
    assert "changed on the way: a from rank 0" in str(error)
    # As after a refit that failed: the generator's ends are made anew.
    pair.add()
    (_, found), sent = pair.refit(weights, 1)
    assert_equal(found, weights)
    assert sent > WHOLE_BYTES
