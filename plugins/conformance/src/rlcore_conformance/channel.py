"""The refit channel's part of the conformance kit."""

import multiprocessing
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import pytest
from attrs import evolve, field, frozen

from rlcore.registry.entries import ChannelEntry
from rlcore.spi import ChannelOptions, ChannelProvider, ChannelReceiver, ChannelSender, ReceiverRank, TensorSpec

Tensors: TypeAlias = list[Any]
_SHAPES = ((3, 5), (7,), (), (0, 4), (130, 2))
_DTYPES = ("float32", "bfloat16", "float16")
_PLAIN = (type(None), bool, int, float, str, bytes)


@frozen(kw_only=True, eq=False)
class Ends:
    """A sender with the receivers that it is connected to."""

    sender: ChannelSender
    receivers: list[ChannelReceiver] = field(factory=list)

    def close(self) -> None:
        """Close every end, and again: an end may be closed twice."""
        for _ in range(2):
            self.sender.close()
            for receiver in self.receivers:
                receiver.close()


class ChannelConformance:
    """Checks of every channel with a sender and a receiver::

        class TestMine(ChannelConformance):
            @pytest.fixture
            def provider(self): return PIPE

    Fixtures to override where the default does not fit: `options` (a folder of the test's) and `device` ("cpu", or "cuda" where
    the channel carries no weights of CPUs; the checks are then skipped without a GPU).
    """

    @pytest.fixture
    def provider(self) -> ChannelProvider:
        """The channel under test: override it."""
        pytest.fail("override the fixture `provider` to return the ChannelProvider under test", pytrace=False)

    @pytest.fixture
    def options(self, tmp_path: Any) -> ChannelOptions:
        """The options of the generator's section."""
        return ChannelOptions(directory=str(tmp_path), timeout_s=30.0)

    @pytest.fixture
    def device(self, provider: ChannelProvider) -> Any:
        """The device of both ends."""
        import torch

        kind = "cpu" if "cpu" in provider.devices else "cuda"
        if kind == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        return torch.device(kind)

    @pytest.fixture
    def ends(self, provider: ChannelProvider, options: ChannelOptions, device: Any) -> Iterator[Ends]:
        """A sender, and the two ranks of one replica in this process."""
        made = Ends(sender=provider.make_sender(options, device))
        (own,) = made.sender.connect([_place(device, rank=rank) for rank in range(2)])
        made.receivers.extend(provider.make_receiver(device, rank, own) for rank in range(2))
        made.sender.join()
        yield made
        made.close()

    def test_the_description(self, provider: ChannelProvider) -> None:
        """It has no faults, and both ends can be imported."""
        entry = ChannelEntry(name=provider.name, distribution="kit", version="1").holding(provider)
        assert entry.error is None
        assert entry.unavailable() is None
        assert provider.sender is not None
        assert provider.receiver is not None

    def test_buckets_arrive(self, ends: Ends, device: Any) -> None:
        """In refit after refit, every rank receives each bucket's tensors: all dtypes, shapes and layouts, to the bit."""
        for refit in range(3):
            buckets = [_tensors(device, 10 * refit + index, count) for index, count in enumerate((5, 1, 9))]
            _begin(ends, buckets)
            for index, tensors in enumerate(buckets):
                where = ends.sender.put(index, tensors)
                for receiver in ends.receivers:
                    _assert_same(receiver.receive(where, _specs(tensors, index)).tensors, tensors)
                    receiver.loaded()
                ends.sender.acknowledged(index)
            _end(ends)

    def test_the_trainers_tensors_stay_as_they_are(self, ends: Ends, device: Any) -> None:
        """Neither end writes to them, also where the export is persistent."""
        tensors, expected = _tensors(device, 1, 6), _tensors(device, 1, 6)
        for persistent in (False, True):
            _begin(ends, [tensors], persistent=persistent)
            _take(ends, 0, tensors)
            _end(ends)
            _assert_same(tensors, expected)

    def test_the_trainer_overwrites_what_is_acknowledged(self, ends: Ends, device: Any) -> None:
        """A bucket that a receiver calls stable keeps its values until the refit ends, whatever becomes of the trainer's."""
        buckets = [_tensors(device, index, 4) for index in range(4)]
        expected = [_tensors(device, index, 4) for index in range(4)]
        _begin(ends, buckets)
        kept = []
        for index, tensors in enumerate(buckets):
            kept.append(_take(ends, index, tensors))
            for tensor in tensors:
                tensor.zero_()
        for received, wanted in zip(kept, expected, strict=True):
            for bucket in received:
                if bucket.stable:
                    _assert_same(bucket.tensors, wanted)
        _end(ends)

    def test_each_replica_has_its_options(self, provider: ChannelProvider, options: ChannelOptions, device: Any) -> None:
        """`connect` returns as many as there are replicas, in plain containers."""
        sender = provider.make_sender(options, device)
        places = [_place(device, replica=replica, rank=rank) for replica in range(2) for rank in range(2)]
        found = sender.connect(places)
        sender.close()
        assert len(found) == 2, f"connect returned {len(found)} options; expected one for each of 2 replicas"
        assert all(isinstance(one, dict) and _is_plain(one) for one in found), f"options are {found}; expected plain containers"

    def test_places_of_buckets_are_plain(self, provider: ChannelProvider, ends: Ends, device: Any) -> None:
        """The value of `put` travels between processes: None, numbers, texts, bytes, and lists, tuples and dicts of these."""
        if provider.reach == "process":
            pytest.skip("within a process anything may be handed over")
        tensors = _tensors(device, 0, 3)
        _begin(ends, [tensors])
        where = ends.sender.put(0, tensors)
        _end(ends)
        assert isinstance(where, dict), f"put returned {where!r}; expected a dict"
        assert _is_plain(where), f"put returned {where!r}; expected plain containers"

    def test_another_process_receives(self, provider: ChannelProvider, options: ChannelOptions, device: Any) -> None:
        """A receiver in a process of its own gets every bucket."""
        if provider.reach == "process":
            pytest.skip("it reaches no other process")
        sender = provider.make_sender(options, device)
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, provider, str(device)), daemon=True)
        process.start()
        try:
            (own,) = sender.connect([evolve(_place(device), pid=process.pid or 0)])
            here.send(own)
            sender.join()
            for refit in range(2):
                tensors = _tensors(device, refit, 6)
                sender.begin(tuple(_specs(tensors)), persistent=False)
                here.send((sender.put(0, tensors), _specs(tensors)))
                assert here.poll(60), "the receiver took more than 60 s"
                answer = here.recv()
                assert not isinstance(answer, str), f"the receiver failed: {answer}"
                sender.acknowledged(0)
                sender.end()
                assert answer == [_bits(tensor) for tensor in tensors], "other values arrived in another process"
        finally:
            here.close()
            there.close()
            process.join(10)
            process.kill()
            sender.close()

    def test_a_refit_that_fails_is_over(self, ends: Ends, device: Any) -> None:
        """`end` gives up buckets that nobody took, and the next refit is whole."""
        tensors = _tensors(device, 0, 4)
        _begin(ends, [tensors])
        ends.sender.put(0, tensors)
        _end(ends)
        again = _tensors(device, 1, 4)
        _begin(ends, [again])
        for bucket in _take(ends, 0, again, lets_go=False):
            _assert_same(bucket.tensors, again)
        _end(ends)

    def test_ends_that_were_never_used_close(self, provider: ChannelProvider, options: ChannelOptions, device: Any) -> None:
        """A sender may be closed before it is connected, and twice."""
        Ends(sender=provider.make_sender(options, device)).close()


def _place(device: Any, replica: int = 0, rank: int = 0) -> ReceiverRank:
    uuid = None
    if device.type == "cuda":
        import torch

        uuid = str(torch.cuda.get_device_properties(device).uuid)
    return ReceiverRank(replica=replica, rank=rank, pid=os.getpid(), host=socket.gethostname(), device=device.type, uuid=uuid)


def _tensors(device: Any, seed: int, count: int) -> Tensors:
    """Tensors of all dtypes and shapes; every other one of two dimensions is a transposed view."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        shape, dtype = _SHAPES[number % len(_SHAPES)], getattr(torch, _DTYPES[number % len(_DTYPES)])
        tensor = torch.randn(shape[::-1] if number % 2 else shape, generator=generator).to(device, dtype)
        made.append(tensor.t() if number % 2 and len(shape) == 2 else tensor)
    return made


def _specs(tensors: Tensors, bucket: int = 0) -> list[TensorSpec]:
    return [
        TensorSpec(name=f"b{bucket}.t{number}", shape=tuple(one.shape), dtype=str(one.dtype).removeprefix("torch."))  # type: ignore[arg-type]
        for number, one in enumerate(tensors)
    ]


def _begin(ends: Ends, buckets: Sequence[Tensors], *, persistent: bool = False) -> None:
    specs = tuple(spec for index, tensors in enumerate(buckets) for spec in _specs(tensors, index))
    ends.sender.begin(specs, persistent=persistent)
    for receiver in ends.receivers:
        receiver.begin(persistent)


def _take(ends: Ends, index: int, tensors: Tensors, *, lets_go: bool = True) -> list[Any]:
    """Return the bucket as each rank has received it."""
    where = ends.sender.put(index, tensors)
    received = [receiver.receive(where, _specs(tensors, index)) for receiver in ends.receivers]
    if lets_go:
        for receiver in ends.receivers:
            receiver.loaded()
        ends.sender.acknowledged(index)
    return received


def _end(ends: Ends) -> None:
    ends.sender.end()
    for receiver in ends.receivers:
        receiver.end()


def _bits(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of a tensor."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


def _assert_same(received: Tensors, expected: Tensors) -> None:
    assert len(received) == len(expected), f"{len(received)} tensors arrived; expected {len(expected)}"
    for number, (found, wanted) in enumerate(zip(received, expected, strict=True)):
        form = f"{found.dtype} {list(found.shape)}"
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), f"tensor {number} arrived as {form}"
        assert _bits(found) == _bits(wanted), f"tensor {number} ({form}) has other values than the trainer's"


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)


def _serve(connection: Any, provider: ChannelProvider, device: str) -> None:
    """Answer each bucket with its bits, or with the text of an error."""
    import torch

    receiver = provider.make_receiver(torch.device(device), 0, connection.recv())
    try:
        while True:
            where, specs = connection.recv()
            receiver.begin(False)
            try:
                connection.send([_bits(tensor) for tensor in receiver.receive(where, specs).tensors])
                receiver.loaded()
                receiver.end()
            except Exception as error:
                connection.send(repr(error))
    except EOFError:
        receiver.close()
