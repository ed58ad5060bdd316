"""Checks of `[optimizer]` against the files of a model, before anything is allocated."""

from collections.abc import Iterator

from rlcore.schema.file_limits import expanded
from rlcore.spi.context import CheckContext
from rlcore.spi.errors import Problem
from rlcore_model_files.directory import stored_shapes
from rlcore_torchkit.optimizer.settings import group_problems, missing_torchao


def optimizer_problems(context: CheckContext, install: str) -> Iterator[Problem]:
    """Refuse moments in 8 bits without torchao, which `install` brings, and patterns of groups that match no tensor.

    Of a model on the Hub, and of adapters, the trainer's build tells.
    """
    spec = context.optimizer
    if spec is None or not context.needs_policy:
        return
    yield from missing_torchao(spec, install)
    directory = expanded(context.model.path)
    if spec.groups and context.lora is None and directory.is_dir():
        names = [*stored_shapes(directory), *(["score.weight"] if context.head == "value" else [])]
        yield from group_problems(spec, names) if len(names) > 1 else ()
