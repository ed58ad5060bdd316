"""The trial of a family in an engine: two refits, samples after each, and the digests of what the engine then holds."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from rlcore import spi
from rlcore.spi.arrays import Float32Array
from rlcore_torchkit.refit.digest import tensor_digests
from rlcore_torchkit.testing.families.backends import (
    build,
    closing,
    error_text,
    generator_context,
    installed_provider,
    judged,
    logprobs_of,
    problems_text,
    refit,
    require_checked,
    trainer_context,
)
from rlcore_torchkit.testing.families.corrections import UNTRIED
from rlcore_torchkit.testing.families.engine import Digests, Family, TriedEngine
from rlcore_torchkit.testing.families.engine_outcome import EngineOutcome
from rlcore_torchkit.testing.families.reference import Reference
from rlcore_torchkit.testing.families.samples import Samples, WrongError
from rlcore_torchkit.testing.families.tiny_model import make_tiny, vary

TOLERANCE = 1e-4
"""Largest distance of log-probabilities in float32."""
TOLERANCES: Mapping[str, float] = {"nemotron_h": 1e-3, "zamba2": 1e-3}
"""Largest distances in float32, by model_type, of families whose states many products round."""
BFLOAT16_MEAN = 0.1
"""Largest mean distance in bfloat16 from the same weights in float32: the engine rounds states after each layer."""
CERTAIN = -0.2
"""Mean log-probability of samples above which weights hardly change any."""
_ERROR = re.compile(r"([\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)$")
_MAX_NAMED = 3


class CannotError(Exception):
    """What an engine raises where it starts or samples."""


def try_family(engine: TriedEngine, family: Family, dtype: spi.DtypeName, scratch: Path) -> EngineOutcome:
    """Return the outcome for a tiny model of a family in this dtype; files go to `scratch`."""
    outcome = EngineOutcome(model_type=family.model_type, implementation=family.implementation, dtype=dtype)
    if family.model_type in UNTRIED:
        return evolve(outcome, reason=UNTRIED[family.model_type])
    torch.manual_seed(0)
    sizes, further = engine.sizes(), engine.options(family.model_type)
    try:
        make_tiny(
            family.model_type,
            family.class_name,
            scratch / "tiny",
            sizes=sizes,
            initial=engine.initializer_range,
            further=further,
        )
    except spi.ModelError as error:
        return evolve(outcome, verdict="refused", reason=problems_text(error))
    except Exception as error:
        return evolve(outcome, reason=f"no tiny model of it can be made: {error_text(error)}")
    directories = [vary(scratch / "tiny", scratch / f"weights-{seed}", seed) for seed in (1, 2)]
    return try_models(engine, outcome, [spi.ModelSpec(path=str(one), dtype=dtype) for one in directories])


def try_models(engine: TriedEngine, outcome: EngineOutcome, models: list[spi.ModelSpec]) -> EngineOutcome:
    """Return the outcome for models that differ in their weights alone, in this order in one engine."""
    found: list[EngineOutcome] = [outcome]
    failures: list[str] = []

    def check() -> None:
        try:
            _try(engine, models, found)
        except CannotError as error:
            failures.append(str(error))

    verdict, reason = judged(check)
    if failures:
        return evolve(found[-1], verdict="cannot", reason=failures[0])
    return evolve(found[-1], verdict=verdict, reason=reason)


def _try(engine: TriedEngine, models: list[spi.ModelSpec], found: list[EngineOutcome]) -> None:
    """Add to `found` what is known so far, and raise what is not as it has to be."""
    dtype = models[0].dtype
    context = generator_context(models[0], engine.channel, engine.device)
    require_checked(engine.provider, context, engine.config(), engine.channel)
    with closing() as closed:
        provider = installed_provider("trainers", engine.trainer)
        trainers = [build(provider, trainer_context(model), closed) for model in models]
        with _engine_errors():
            own = engine.own_digests(models[-1])
            backend = engine.start(context)
        closed.append(backend)
        for version, (model, trainer) in enumerate(zip(models, trainers, strict=True), 1):
            try:
                result = refit(backend, trainer, 0, sent_as=version, channel=engine.channel, dtype=dtype)
            except spi.RefitError as error:
                text = engine_error(error) if "\n" in str(error) else str(error)
                raise spi.ModelError([spi.Problem(path=model.path, found=text, expected="a refit")]) from error
            _compare_arrived(result.digests, _tensors(model), dtype)
            reference = Reference(model)
            with _engine_errors():
                samples = Samples(backend, reference.vocab_size, version)
            if samples.logprobs.mean() > CERTAIN:
                raise ValueError(f"its tiny model is certain of its tokens: log-probabilities of {samples.logprobs.mean():.2g}")
            distances = samples.distances(partial(_by_reference, reference))
            found.append(evolve(found[-1], distance=max(found[-1].distance or 0.0, float(distances.max()))))
            _compare_samples(distances, reference.model_type, dtype, f"transformers' after refit {version}")
            if dtype == "float32":
                by_trainer = samples.distances(partial(_by_trainer, trainer))
                _compare_samples(by_trainer, reference.model_type, dtype, f"the trainer's after refit {version}")
        held = engine.held_digests(backend)
        changed = result.digests.keys() - held.keys()
        found.append(evolve(found[-1], num_tensors=len(result.digests), num_changed=len(changed)))
        _compare_held(held, own)


@torch.no_grad()
def _by_reference(reference: Reference, batch: spi.TokenBatch) -> Float32Array:
    logprobs: Float32Array = reference.logprobs(batch).numpy()
    return logprobs


def _by_trainer(trainer: Any, batch: spi.TokenBatch) -> Float32Array:
    return logprobs_of(trainer, [batch], 0)


@contextmanager
def _engine_errors() -> Iterator[None]:
    """CannotError for what an engine raises, with the line of a traceback in it that says most."""
    try:
        yield
    except (WrongError, spi.ModelError):
        raise
    except Exception as error:
        raise CannotError(engine_error(error)) from error


def engine_error(error: BaseException) -> str:
    """Return the engine's own error in one line: the last that a text of several processes or a chain of causes names."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^~")]
    for number, line in reversed(list(enumerate(lines))):
        if len(lines) > 1 and (match := _ERROR.match(line)):
            # Of an assertion without words its line says more.
            return match[1] if ":" in match[1] or number == 0 else f"{match[1]}: {lines[number - 1]}"
    return error_text(error)


def _tensors(model: spi.ModelSpec) -> dict[str, Tensor]:
    """The tensors in a model's files."""
    from safetensors.torch import load_file

    return {name: tensor for file in Path(model.path).glob("*.safetensors") for name, tensor in load_file(file).items()}


def _compare_arrived(digests: Digests, tensors: Mapping[str, Tensor], dtype: spi.DtypeName) -> None:
    """Compare the digests that a refit acknowledges with those of the model's files, in the model's dtype or the file's."""
    if digests.keys() != tensors.keys():
        raise WrongError(f"the refit brought other tensors than the files have: {_named(digests.keys() ^ tensors.keys())}")
    casts = [tensors, {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}]
    expected = [dict(zip(each, tensor_digests(each.values()), strict=True)) for each in casts]
    others = {name for name, digest in digests.items() if all(digest != each[name] for each in expected)}
    if others:
        raise WrongError(f"the refit's digests are not those of the files: {_named(others)}")


def _compare_samples(distances: np.ndarray, model_type: str, dtype: spi.DtypeName, whose: str) -> None:
    exact = dtype == "float32"
    distance = float(distances.max() if exact else distances.mean())
    if not distance <= (TOLERANCES.get(model_type, TOLERANCE) if exact else BFLOAT16_MEAN):
        raise WrongError(f"log-probabilities of samples {distance:.2g} from {whose}")


def _compare_held(held: Digests, own: Digests) -> None:
    """Compare what the engine holds after refits with what its own loader makes of the files."""
    different = {name for name in held.keys() | own.keys() if held.get(name) != own.get(name)}
    if different:
        raise WrongError(f"after the refit the engine holds other tensors than its own loader makes: {_named(different)}")


def _named(names: Any) -> str:
    shown = sorted(names)
    return f"{', '.join(shown[:_MAX_NAMED])} of {len(shown)}"
