"""Where a fake's memory lives, and how much of it: bookkeeping alone, since its arrays stay in the host's memory."""

from rlcore.spi import OffloadRequest, OffloadResult, RankInfo


def count_offload(rank_info: RankInfo, request: OffloadRequest, *, weight_bytes: int, state_bytes: int) -> OffloadResult:
    """What would be left on the device; on CPU, where both places are one, everything."""
    is_one_memory = rank_info.device == "cpu"
    weights = weight_bytes if is_one_memory or request.weights == "device" else 0
    state = state_bytes if is_one_memory or request.state == "device" else 0
    return OffloadResult(device_bytes=weights + state)
