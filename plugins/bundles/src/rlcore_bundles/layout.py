"""A trainer's layout as a word of the command line: its name, its ranks, and its own keys of them."""

from rlcore.spi import ConfigError, Problem

EXPECTED = "a trainer, and behind a colon KEY=VALUE pairs, such as fsdp2:ranks=2,tensor_parallel=2"


def layout_overrides(text: str) -> list[str]:
    """The overrides of a recipe for a layout: `ranks` is the number of processes, all other keys are those of the trainer's
    section. ConfigError where the text is none."""
    name, _, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")] if rest else []
    if not name or any(not (key and value) for key, _, value in pairs):
        raise ConfigError([Problem(path="--layout", found=repr(text), expected=EXPECTED)])
    keys = {key.strip(): value.strip() for key, _, value in pairs}
    ranks = keys.pop("ranks", None)
    if ranks is not None and not (ranks.isdecimal() and int(ranks) > 0):
        raise ConfigError([Problem(path="--layout", found=f"{ranks} ranks", expected="a number above 0")])
    own = [f"trainer.{name}.{key}={value}" for key, value in keys.items()]
    return [f"trainer.name={name}", *own, *([] if ranks is None else [f"cluster.gpus_per_node={ranks}"])]
