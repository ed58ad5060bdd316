"""The trial of a model: it is trained for a step and sampled from, and its numbers are compared."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from rlcore import spi
from rlcore.installed import installed_entry_points
from rlcore_fsdp2.families.checks import (
    MAX_LENGTH,
    WrongError,
    check_samples,
    check_step,
    generator_context,
    trainer_context,
)
from rlcore_fsdp2.families.corrections import UNTRIED
from rlcore_fsdp2.families.images import ImageReference, make_tiny_image_model
from rlcore_fsdp2.families.outcome import Outcome
from rlcore_fsdp2.families.reference import Reference
from rlcore_fsdp2.families.tiny_model import make_tiny
from rlcore_torchkit.architectures.decoders import IMAGE_MODELS, has_states, is_described
from rlcore_torchkit.architectures.image_faults import image_fault
from rlcore_torchkit.forward.decoder_forward import has_own_attention
from rlcore_torchkit.huggingface.models import quiet_transformers

_MAX_SHOWN = 300


def try_family(model_type: str, class_name: str, scratch: Path) -> Outcome:
    """Return the outcome for the causal language model that transformers builds of `model_type`; files go to `scratch`."""
    outcome = Outcome(model_type=model_type, class_name=class_name, trainer_reason=UNTRIED.get(model_type, ""))
    if outcome.trainer_reason:
        return outcome
    torch.manual_seed(0)
    try:
        with quiet_transformers():
            options = make_tiny(model_type, class_name, scratch / "model")
    except spi.ModelError as error:
        reason = _reason(error.problems)
        return evolve(outcome, trainer="refused", trainer_reason=reason, generator="refused", generator_reason=reason)
    except Exception as error:
        return evolve(outcome, trainer_reason=f"no tiny model of it can be made: {_told(error)}")
    model = spi.ModelSpec(path=str(scratch / "model"), dtype="float32")
    return _tried(evolve(outcome, options=options), model, scratch)


def try_image_family(model_type: str, class_name: str, scratch: Path) -> Outcome:
    """Return the outcome for the model of images that transformers builds of `model_type`, of its trainer alone; files go to
    `scratch`."""
    outcome = Outcome(model_type=model_type, class_name=class_name)
    torch.manual_seed(0)

    def train() -> None:
        if model_type not in IMAGE_MODELS:
            raise spi.ModelError([spi.Problem(path="config.json", found=image_fault(model_type), expected="another class")])
        make_tiny_image_model(model_type, class_name, scratch / "model")
        model = spi.ModelSpec(path=str(scratch / "model"), dtype="float32")
        with _closing() as closed:
            trainer = _build(_installed("trainers", "fsdp2"), trainer_context(model), closed)
            check_step(trainer, ImageReference(model), scratch)

    with quiet_transformers():
        return evolve(outcome, **_judged("trainer", train))


def try_model(directory: Path, scratch: Path, *, trust_remote_code: bool = False, trainer: str = "fsdp2") -> Outcome:
    """Return the outcome for the model in `directory`, of any size and family, with an installed trainer; files go to
    `scratch`."""
    model = spi.ModelSpec(path=str(directory), dtype="float32", trust_remote_code=trust_remote_code)
    return _tried(Outcome(model_type=str(directory), class_name=""), model, scratch, trainer)


def _tried(outcome: Outcome, model: spi.ModelSpec, scratch: Path, trainer: str = "fsdp2") -> Outcome:
    trainers: list[Any] = []
    ways: list[str] = []
    with _closing() as closed:

        def train() -> None:
            trainers.append(_build(_installed("trainers", trainer), trainer_context(model), closed))
            ways.append(_way(trainers[0].policy) if trainer == "fsdp2" else trainer)
            check_step(trainers[0], Reference(model), scratch)

        def generate() -> None:
            generator = _build(
                _installed("generators", "transformers"), generator_context(model, has_trainer=bool(trainers)), closed
            )
            check_samples(generator, trainers[0] if trainers else None, model)

        outcome = evolve(outcome, **_judged("trainer", train), way="".join(ways))
        return outcome if outcome.trainer in ("wrong", "crashed") else evolve(outcome, **_judged("generator", generate))


def _installed(role: str, name: str) -> spi.Provider:
    """Return the installed provider of a role. LookupError without exactly one."""
    points = list(installed_entry_points().entry_points.select(group=f"rlcore.{role}", name=name))
    if len(points) != 1:
        raise LookupError(f"{len(points)} installed {role} {name}; expected one")
    provider: spi.Provider = points[0].load()
    return provider


def _judged(role: str, check: Callable[[], None]) -> dict[str, str]:
    """Return verdict and reason of a role, by what `check` raises."""
    try:
        check()
        verdict, reason = "agrees", ""
    except spi.ModelError as error:
        verdict, reason = "refused", _reason(error.problems)
    except WrongError as error:
        verdict, reason = "wrong", str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict, reason = "crashed", f"{_told(error)} ({Path(where.filename).name}:{where.lineno})"
    return {role: verdict, f"{role}_reason": reason}


def _way(model: Any) -> str:
    """Return how the trainer computes a model, in a few words."""
    if is_described(model):
        return "its description"
    if has_own_attention(model):
        return "its own attention"
    return "packed attention and states" if has_states(model) else "packed attention"


def _reason(problems: Sequence[spi.Problem]) -> str:
    return "; ".join(problem.found for problem in problems)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_SHOWN]}"


@contextmanager
def _closing() -> Iterator[list[Any]]:
    """Close the backends that were added."""
    backends: list[Any] = []
    try:
        yield backends
    finally:
        for backend in backends:
            backend.close(spi.CloseRequest())


def _build(provider: spi.Provider, context: Any, closed: list[Any]) -> Any:
    """Return a provider's backend after its check, as a run builds it. ModelError with what `check` finds."""
    model = context.model
    check = spi.CheckContext(model=model, device="cpu", world_size=1, max_sequence_length=MAX_LENGTH, channel="in_process")
    config = provider.config()
    problems = [found for found in _loaded(provider.check)(check, config) if isinstance(found, spi.Problem)]
    if problems:
        raise spi.ModelError(problems)
    backend = _loaded(provider.backend)(context, config)
    closed.append(backend)
    return backend


def _loaded(path: Any) -> Any:
    module, _, name = str(path).partition(":")
    return getattr(import_module(module), name)
