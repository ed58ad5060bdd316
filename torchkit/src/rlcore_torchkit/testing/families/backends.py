"""Trainers and generators of tiny models, built as a run builds them, and what they raise as verdicts."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from attrs import evolve

from rlcore import spi
from rlcore.installed import installed_entry_points
from rlcore.spi.arrays import Float32Array
from rlcore_torchkit.testing.families.samples import MAX_LENGTH, WrongError

OPTIMIZER = spi.OptimizerSpec(learning_rate=0.1, eps=1.0, max_grad_norm=0.0)
"""AdamW's epsilon: so large that the first step is nearly the gradient, and the weights after it show each gradient."""
_MAX_SHOWN = 300
"""Characters of an error."""


def trainer_context(model: spi.ModelSpec) -> spi.TrainerContext:
    """Return the context of a trainer of this model for one step."""
    return spi.TrainerContext(
        model=model,
        rank_info=spi.RankInfo(),
        seed=0,
        num_train_steps=1,
        needs_reference=False,
        max_sequence_length=MAX_LENGTH,
        optimizer=OPTIMIZER,
        schedule=spi.ScheduleSpec(),
    )


def generator_context(
    model: spi.ModelSpec, channel: str | None = "in_process", device: Literal["cpu", "cuda"] = "cpu"
) -> spi.GeneratorContext:
    """Return the context of a generator of this model, whose weights come by `channel`; None where it reads them itself."""
    rank_info = spi.RankInfo(device=device)
    return spi.GeneratorContext(model=model, rank_info=rank_info, seed=0, max_sequence_length=MAX_LENGTH, channel=channel)


def installed_provider(role: str, name: str) -> spi.Provider:
    """Return the provider of a role, such as "generators". ModelError where it is not installed."""
    points = installed_entry_points().entry_points.select(group=f"rlcore.{role}", name=name)
    if not points:
        found, remedy = f"no {role.removesuffix('s')} {name}", "Install its package"
        raise spi.ModelError([spi.Problem(path=name, found=found, expected="one", remedy=remedy)])
    provider: spi.Provider = next(iter(points)).load()
    return provider


def require_checked(provider: spi.Provider, context: Any, config: Any, channel: str | None = "in_process") -> None:
    """Run a provider's check of a model, as a run does before anything is built. ModelError with what it finds."""
    check = spi.CheckContext(
        model=context.model,
        device=context.rank_info.device,
        world_size=1,
        max_sequence_length=MAX_LENGTH,
        channel=channel,
    )
    problems = [found for found in _loaded(provider.check)(check, config) if isinstance(found, spi.Problem)]
    if problems:
        raise spi.ModelError(problems)


def build(provider: spi.Provider, context: Any, closed: list[Any]) -> Any:
    """Return a provider's backend after its check, with the options' defaults, and add it to `closed`. ModelError with what
    `check` finds."""
    config = provider.config()
    require_checked(provider, context, config)
    backend = _loaded(provider.backend)(context, config)
    closed.append(backend)
    return backend


@contextmanager
def closing() -> Iterator[list[Any]]:
    """Close the backends that were added."""
    backends: list[Any] = []
    try:
        yield backends
    finally:
        for backend in backends:
            backend.close(spi.CloseRequest())


def logprobs_of(trainer: Any, batches: Sequence[spi.TokenBatch], version: int) -> Float32Array:
    """float32 [T]: the log-probabilities of all tokens of the batches by a trainer's policy."""
    request = spi.LogprobsRequest(
        microbatches=tuple(batches), model="policy", temperature=1.0, entropy=False, weight_version=version
    )
    return np.concatenate(trainer.get_logprobs(request).logprobs)


def refit(
    generator: Any,
    trainer: Any,
    weight_version: int,
    *,
    sent_as: int | None = None,
    channel: str = "in_process",
    dtype: spi.DtypeName = "float32",
) -> spi.RefitResult:
    """Bring the version that a trainer holds to a generator, by another number where `sent_as` is one."""
    export = trainer.export_weights(
        spi.ExportWeightsRequest(weight_version=weight_version, dtype=dtype, max_bucket_bytes=2**20)
    )
    version = weight_version if sent_as is None else sent_as
    sent = evolve(export, weight_version=version)
    request = spi.RefitRequest(weight_version=version, channel=channel, weights=sent, may_alias=False)
    result: spi.RefitResult = generator.refit(request)
    return result


def judged(check: Callable[[], None]) -> tuple[Literal["agrees", "refused", "wrong", "crashed"], str]:
    """Return verdict and reason, by what `check` raises."""
    try:
        check()
    except spi.ModelError as error:
        return "refused", problems_text(error)
    except WrongError as error:
        return "wrong", str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "crashed", f"{error_text(error)} ({Path(where.filename).name}:{where.lineno})"
    return "agrees", ""


def problems_text(error: spi.ModelError) -> str:
    """Return what was found, of all problems."""
    return "; ".join(problem.found for problem in error.problems)


def error_text(error: BaseException) -> str:
    """Return an error's class and the beginning of what it says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_SHOWN]}"


def _loaded(path: Any) -> Any:
    module, _, name = str(path).partition(":")
    return getattr(import_module(module), name)
