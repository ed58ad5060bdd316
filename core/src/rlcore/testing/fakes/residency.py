"""Where a fake's memory lives, and how much of it: bookkeeping alone, since its arrays stay in the host's memory."""

from rlcore.spi import RankInfo, SetResidencyRequest, SetResidencyResult


def count_residency(
    place: RankInfo, request: SetResidencyRequest, *, weight_bytes: int, state_bytes: int
) -> SetResidencyResult:
    """What would be left on the device; on CPU, where both places are one, everything."""
    one_place = place.device == "cpu"
    weights = weight_bytes if one_place or request.weights == "device" else 0
    state = state_bytes if one_place or request.state == "device" else 0
    return SetResidencyResult(device_bytes=weights + state)
