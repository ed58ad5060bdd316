"""Digests of a trainer's weights, by the names of its tensors."""

import tempfile
from pathlib import Path

from rlcore.spi import SaveStateRequest
from rlcore.spi.execution import TrainerGroup


def weight_digests(trainer: TrainerGroup, within: Path | None = None) -> dict[str, int]:
    """The digest of each tensor of the trainer's model, by its name. The model is written to a temporary folder below `within`,
    which all ranks reach; by default the system's."""
    from safetensors.torch import load_file

    from rlcore_torchkit.refit.digest import tensor_digest

    with tempfile.TemporaryDirectory(dir=within) as folder:
        trainer.save_state(SaveStateRequest(directory=Path(folder), kind="hf"))
        return {
            name: tensor_digest(tensor)
            for file in sorted(Path(folder).glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
