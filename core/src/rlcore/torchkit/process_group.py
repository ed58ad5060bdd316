"""The default process group of torch.distributed, shared by the trainers of one process and destroyed with the last."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlcore.spi.context import RankSpec
from rlcore.spi.errors import ContractError

_num_users = 0
_is_ours = False


def join(place: RankSpec, timeout_s: float) -> None:
    """Make the default group, or use the one that exists; pair with `leave`.

    Raises ContractError where a group of another size or rank exists, or where several ranks have no rendezvous.
    """
    global _num_users, _is_ours
    if dist.is_initialized():
        found = (dist.get_rank(), dist.get_world_size())
        if found != (place.rank, place.world_size):
            expected = f"rank {place.rank} of {place.world_size}"
            raise ContractError(f"process group: found rank {found[0]} of {found[1]}; expected {expected}, or none yet")
    else:
        _initialize(place, timeout_s)
        _is_ours = True
    _num_users += 1


def leave() -> None:
    """Give up one use; the last destroys the group if `join` made it."""
    global _num_users, _is_ours
    _num_users -= 1
    if _num_users == 0 and _is_ours:
        dist.destroy_process_group()
        _is_ours = False


def _initialize(place: RankSpec, timeout_s: float) -> None:
    # No device_id: with one, NCCL would connect every group when it is made, whether it is used or not, and all ranks would
    # take part in it each time.
    options: dict[str, Any] = {
        "backend": "cpu:gloo,cuda:nccl" if place.device == "cuda" else "gloo",
        "rank": place.rank,
        "world_size": place.world_size,
        "timeout": timedelta(seconds=timeout_s),
    }
    if place.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]  # no socket for a group of one
        dist.init_process_group(store=store, **options)
    elif place.rendezvous is None:
        raise ContractError(
            f"rendezvous: found None with {place.world_size} ranks; expected an address such as tcp://host:port"
        )
    else:
        dist.init_process_group(init_method=place.rendezvous, **options)
