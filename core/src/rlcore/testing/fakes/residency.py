"""The place and amount of a fake's memory: bookkeeping alone, since its arrays stay in the host's memory."""

from rlcore.spi import RankInfo, SetResidencyRequest, SetResidencyResult


def count_residency(
    rank_info: RankInfo, request: SetResidencyRequest, *, weight_bytes: int, state_bytes: int
) -> SetResidencyResult:
    """Return the memory that would be left on the device; on CPU, where both places are one, everything."""
    is_one_memory = rank_info.device == "cpu"
    weights = weight_bytes if is_one_memory or request.weights == "device" else 0
    state = state_bytes if is_one_memory or request.state == "device" else 0
    return SetResidencyResult(device_bytes=weights + state)
