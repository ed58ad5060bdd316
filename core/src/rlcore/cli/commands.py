"""The core's own commands, each described for an entry point of the core's pyproject.toml."""

from rlcore.spi.command import CommandSpec
from rlcore.spi.version import SPI_VERSION


def _core_command(name: str, text: str, command: str, priority: int) -> CommandSpec:
    return CommandSpec(name=name, spi=SPI_VERSION, help=text, command=f"rlcore.cli.{command}", priority=priority)


TRAIN = _core_command("train", "Train a model.", "train:train_command", 90)
EVAL = _core_command("eval", "Measure a model on held-out problems.", "evaluate:eval_command", 85)
CONFIG = _core_command("config", "Print a recipe with every default.", "config:config_command", 40)
