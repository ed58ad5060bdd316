"""Seconds until ranks apart hold what trainer ranks hold in parts: sent whole, and by `refit.channel = "shards"`.

    python benchmarks/refit_shards.py --shape 8b --senders 1          # two GPUs
    python benchmarks/refit_shards.py --shape 8b --senders 2          # three
    python benchmarks/refit_shards.py --shape 8b --receivers 2        # three
    python benchmarks/refit_shards.py --shape 8b --receivers 2 --tensor-parallel 2
    python benchmarks/refit_shards.py --layers 1 --device cpu         # the first layer and the embedding, by gloo
    python benchmarks/refit_shards.py --quick --device cpu            # a tiny shape

The weights of a shape in bfloat16, cut by rows over the senders as FSDP does; their number divides those of all rows.
`gathered` gathers each tensor on all senders, and the first broadcasts it, with its digest at both ends. `shards` sends the
parts by their plan, with the digest of each bucket at both ends; several receivers pass them on among themselves. `as read`
does so, and brings each receiver what a rank of engines of `--tensor-parallel` ranks reads: its rows or columns or, with
`--expert-parallel`, of experts its own. `changed` is `shards` with copies at both ends (`refit.delta`), of weights of which a
share, chosen at random, is another than the time before. No engine takes part. The bytes are those that each sender hands to
the network, where a gather is counted as a ring and a broadcast once, and those that each receiver gets.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from attrs import evolve
from model_shapes import SHAPES, config_of, require_device

from rlcore.spi import ShardRoute, ShardSlice, TensorSpec
from rlcore_torchkit.testing.ranks import free_address, launch

BUCKET_BYTES = 2**28
CHANGED = (0.001, 0.01, 0.1)


def measure(
    rank: int,
    address: str,
    store: str,
    specs: tuple[TensorSpec, ...],
    device_name: str,
    senders: int,
    receivers: int,
    engine: tuple[int, bool],
    repeats: int,
    file: str,
) -> None:
    """One rank; the first writes what is to be printed to `file`."""
    import torch
    import torch.distributed as dist

    from rlcore_torchkit.distributed.process_group import listening_store
    from rlcore_torchkit.refit.shard_route import ShardEnd
    from rlcore_torchkit.refit.shard_slices import whole_slice, with_rest

    device, groups = join(rank, address, device_name, senders, receivers)
    host, _, port = store.removeprefix("tcp://").rpartition(":")
    kept = [listening_store(host, int(port), None, timedelta(seconds=600), wait_for_workers=False)] if rank == 0 else []
    dist.barrier()
    held = [[rows_of(spec, number, senders) for spec in specs] for number in range(senders)]
    wanted = tuple(map(whole_slice, specs))
    route = ShardRoute(address=f"{host}:{port}", name="benchmark", wanted=(wanted,) * receivers, timeout_s=600)
    start = time.perf_counter()
    end = ShardEnd(specs=specs, held=held, route=route, rank=rank, max_bytes=BUCKET_BYTES, device=device)
    joined_s = time.perf_counter() - start
    as_read = [as_an_engine_reads(specs, number % engine[0], *engine) for number in range(receivers)]
    route = evolve(route, name="as-read", wanted=with_rest(specs, as_read))
    narrow = ShardEnd(specs=specs, held=held, route=route, rank=rank, max_bytes=BUCKET_BYTES, device=device)
    parts = {box: torch.randn(box.shape, dtype=torch.bfloat16, device=device) for box in held[rank]} if rank < senders else {}

    def by_shards(end: ShardEnd) -> None:
        if rank < senders:
            for number in range(len(end.windows)):
                end.run(number, parts, {})
        else:
            end.take(lambda _: None)

    ways: dict[str, Callable[[], None]] = {
        "gathered": lambda: gather_and_send(rank, specs, held, parts, groups, device),
        "shards": lambda: by_shards(end),
        "as read": lambda: by_shards(narrow),
    }
    lines = []
    for name, way in ways.items():
        times = [timed(way, device) for _ in range(repeats)]
        if name == "gathered":
            sent, received = gathered_bytes(specs, senders), [model_bytes(specs)] * receivers
        else:
            used = end if name == "shards" else narrow
            sent, received = planned_bytes(used, senders), told_by_all(used.received_bytes)[senders:]
        seconds = f"first {times[0]:.3f} s, then {median(times[1:]):.3f} s"
        lines.append(f"{name:13} {seconds}; MB sent by each: {listed(sent)}; received by each: {listed(received)}")
    lines += [of_changes(share, end, parts, device, repeats, senders) for share in CHANGED]
    if rank == 0:
        lines.append(f"plan and connection: {joined_s:.3f} s, {len(end.windows)} windows")
        Path(file).write_text("\n".join(lines))
    dist.barrier()
    end.close()
    narrow.close()
    del kept
    dist.destroy_process_group()


def join(rank: int, address: str, device_name: str, senders: int, receivers: int) -> tuple[Any, tuple[Any, Any]]:
    """The rank's device, and the groups of the senders, and of the first of them with all receivers."""
    import torch
    import torch.distributed as dist

    from rlcore_torchkit.distributed.process_group import keep_on_loopback

    keep_on_loopback()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    is_cuda = device_name == "cuda"
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", init_method=address, rank=rank, world_size=senders + receivers)
    return device, (dist.new_group(list(range(senders))), dist.new_group([0, *range(senders, senders + receivers)]))


def gather_and_send(rank: int, specs: Any, held: Any, parts: Any, groups: Any, device: Any) -> None:
    """Each tensor whole on every sender; from the first of them to all receivers."""
    import torch
    import torch.distributed as dist

    from rlcore_torchkit.refit.digest import tensor_digest

    senders = len(held)
    for number, spec in enumerate(specs):
        if rank >= senders:
            whole = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
            dist.broadcast(whole, 0, group=groups[1])
            tensor_digest(whole)
            continue
        own = [torch.empty(boxes[number].shape, dtype=torch.bfloat16, device=device) for boxes in held]
        dist.all_gather(own, parts[held[rank][number]], group=groups[0])
        whole = torch.cat(own)
        if rank == 0:
            tensor_digest(whole)
            dist.broadcast(whole, 0, group=groups[1])


def of_changes(share: float, end: Any, parts: Any, device: Any, repeats: int, senders: int) -> str:
    """The row of a share of values that is changed before each refit, after one that brings all."""
    import torch

    from rlcore_torchkit.refit.shard_cache import ShardCache

    kept, sent = ShardCache(device), [0]

    def refit() -> None:
        if not parts:
            end.take(lambda _: None, kept=kept)
            return
        sent[0], in_step = 0, end.in_step(kept.version)
        with kept.changing(0):
            for number, window in enumerate(end.windows):
                sent[0] += end.run(number, parts, {}, last=kept.tensors, in_step=in_step).sent_bytes
                pieces = {piece.box: piece for piece in end.pieces(number)}
                kept.put({box: parts[piece.held][box.within(piece.held)] for box, piece in pieces.items()}, window.specs)

    refit()
    times = []
    for _ in range(repeats):
        for part in parts.values():
            part[torch.rand(part.shape, device=device) < share] *= 1.5
        times.append(timed(refit, device))
    bytes_of_each = listed(told_by_all(sent[0])[:senders], 3)
    return f"{f'{share:.1%} changed':13} {median(times):.3f} s; MB sent by each: {bytes_of_each}"


def told_by_all(own: int) -> list[int]:
    import torch.distributed as dist

    told: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


def listed(num_bytes: Sequence[float], digits: int = 1) -> str:
    return " ".join(f"{each / 1e6:.{digits}f}" for each in num_bytes)


def timed(way: Callable[[], None], device: Any) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter() - start


def specs_of(shape: str, layers: int | None) -> tuple[TensorSpec, ...]:
    """Every parameter of the shape, with so many layers."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        config = config_of(shape)
        config.num_hidden_layers = config.num_hidden_layers if layers is None else layers
        model = AutoModelForCausalLM.from_config(config)
    return tuple(TensorSpec(name=name, shape=tuple(p.shape), dtype="bfloat16") for name, p in model.named_parameters())


def rows_of(spec: TensorSpec, number: int, senders: int) -> ShardSlice:
    """The rows of one sender."""
    first, stop = (spec.shape[0] * place // senders for place in (number, number + 1))
    return ShardSlice(spec.name, (first, *(0 for _ in spec.shape[1:])), (stop, *spec.shape[1:]))


def as_an_engine_reads(specs: tuple[TensorSpec, ...], place: int, num_ranks: int, by_experts: bool) -> list[ShardSlice]:
    """What one rank of an engine reads of the tensors, as vLLM's layers do."""
    found = []
    for spec in specs:
        start, stop = [0] * len(spec.shape), list(spec.shape)
        names = spec.name.split(".")
        # Transformers has a layer's experts in one tensor each of three dimensions.
        is_of_experts = "experts" in names
        if by_experts and is_of_experts:
            dim = 0
        elif (len(spec.shape) == 1 and not names[-2].endswith(("q_proj", "k_proj", "v_proj"))) or "gate" in names:
            dim = None
        else:
            dim = len(spec.shape) - (1 if {"o_proj", "down_proj"} & {*names} else 2 if len(spec.shape) > 1 else 1)
        if dim is not None:
            start[dim], stop[dim] = (spec.shape[dim] * each // num_ranks for each in (place, place + 1))
        found.append(ShardSlice(spec.name, tuple(start), tuple(stop)))
    return found


def model_bytes(specs: tuple[TensorSpec, ...]) -> float:
    return sum(2.0 * ShardSlice(spec.name, (0,) * len(spec.shape), spec.shape).size for spec in specs)


def gathered_bytes(specs: tuple[TensorSpec, ...], senders: int) -> list[float]:
    total = model_bytes(specs)
    return [total * (senders - 1) / senders + (total if number == 0 else 0) for number in range(senders)]


def planned_bytes(end: Any, senders: int) -> list[float]:
    sent = [0.0] * senders
    for window in end.windows:
        for bucket in window.buckets:
            sent[bucket.sender] += bucket.num_bytes
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--senders", type=int, default=1, help="trainer ranks, on CUDA each with a GPU of its own")
    parser.add_argument("--receivers", type=int, default=1, help="ranks of engines, each with a GPU of its own too")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="so many of the receivers are one engine")
    parser.add_argument("--expert-parallel", action="store_true", help="each rank of an engine has experts of its own")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, twice")
    options = parser.parse_args()
    require_device(options.device)
    if options.receivers % options.tensor_parallel:
        parser.error(f"found {options.receivers} receivers; expected a multiple of --tensor-parallel {options.tensor_parallel}")
    shape, repeats = ("tiny", 2) if options.quick else (options.shape, options.repeats)
    print(f"{shape} on {options.device}, {options.senders} sender(s), {options.receivers} receiver(s)")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lines"
        arguments = (
            free_address(),
            free_address(),
            specs_of(shape, options.layers),
            options.device,
            options.senders,
            options.receivers,
            (options.tensor_parallel, options.expert_parallel),
            repeats,
            str(file),
        )
        launch(measure, arguments, options.senders + options.receivers)
        print(file.read_text())


if __name__ == "__main__":
    main()
