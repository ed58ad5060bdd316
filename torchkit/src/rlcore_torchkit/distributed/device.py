"""The device of a rank."""

import torch

from rlcore.spi.context import RankInfo
from rlcore.spi.errors import ConfigError, Problem


def use_device(rank_info: RankInfo) -> torch.device:
    """The rank's device, made this process's current one; ConfigError where torch has none such."""
    if rank_info.device == "cpu":
        return torch.device("cpu")
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank_info.local_rank >= number:
        problem = Problem(
            path="run.device",
            found=f'"cuda", where torch {torch.__version__} sees {number} CUDA device(s)',
            expected=f"at least {rank_info.local_rank + 1}, in a torch that was built for CUDA",
            remedy='Look at what nvidia-smi shows and CUDA_VISIBLE_DEVICES hides, or set run.device = "cpu".',
        )
        raise ConfigError([problem])
    device = torch.device("cuda", rank_info.local_rank)
    torch.cuda.set_device(device)
    return device
