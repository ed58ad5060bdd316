"""The trial of a family in an engine: two refits, samples after each, and the digests of what the engine then holds."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

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
BFLOAT16_FACTOR = 2.0
"""Largest mean distance of bfloat16 from float32, as a multiple of the one that transformers' own bfloat16 has."""
CERTAIN = -0.2
"""Mean log-probability of samples above which weights hardly change any."""
_ERROR = re.compile(r"([\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)$")
_FRAME = re.compile(r'File "[^"]*/(?:site-packages|src)/(\w+)')
_CALLED = frozenset({"torch", "triton"})
"""Packages whose errors are those of their callers."""
_MAX_NAMED = 3


class CannotError(Exception):
    """An error of the engine's own code, where it starts or samples."""


class UntrainedError(Exception):
    """The trainer refuses the model, so that no run samples from it."""


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
        return evolve(outcome, reason=f"no trial makes such a model: {problems_text(error)}")
    except Exception as error:
        return evolve(outcome, verdict="crashed", reason=f"no tiny model of it can be made: {error_text(error)}")
    directories = [vary(scratch / "tiny", scratch / f"weights-{seed}", seed) for seed in (1, 2)]
    return try_models(engine, outcome, [spi.ModelSpec(path=str(one), dtype=dtype) for one in directories])


def try_models(engine: TriedEngine, outcome: EngineOutcome, models: list[spi.ModelSpec]) -> EngineOutcome:
    """Return the outcome for models that differ in their weights alone, in this order in one engine."""
    found: list[EngineOutcome] = [outcome]
    verdicts: list[EngineOutcome] = []

    def check() -> None:
        try:
            _try(engine, models, found)
        except CannotError as error:
            verdicts.append(evolve(found[-1], verdict="cannot", reason=str(error)))
        except UntrainedError as error:
            verdicts.append(evolve(found[-1], verdict="not tried", reason=str(error)))

    verdict, reason = judged(check)
    return verdicts[0] if verdicts else evolve(found[-1], verdict=verdict, reason=reason)


def _try(engine: TriedEngine, models: list[spi.ModelSpec], found: list[EngineOutcome]) -> None:
    """Add to `found` what is known so far, and raise what is not as it has to be."""
    dtype = models[0].dtype
    context = generator_context(models[0], engine.channel, engine.device)
    require_checked(engine.provider, context, engine.config(), engine.channel)
    with closing() as closed:
        try:
            provider = installed_provider("trainers", engine.trainer)
            trainers = [build(provider, trainer_context(model), closed) for model in models]
        except spi.ModelError as error:
            texts = [f"found {problem.found}; expected {problem.expected}" for problem in error.problems]
            raise UntrainedError(f"{engine.trainer} refuses it: {'; '.join(texts)}") from error
        with _engine_errors(engine, alone=True):
            own = engine.own_digests(models[-1])
        with _engine_errors(engine):
            backend = engine.start(context)
        closed.append(backend)
        for version, (model, trainer) in enumerate(zip(models, trainers, strict=True), 1):
            try:
                result = refit(backend, trainer, 0, sent_as=version, channel=engine.channel, dtype=dtype)
            except spi.RefitError as error:
                text = engine_error(error) if "\n" in str(error) else str(error)
                raise WrongError(f"refit {version} failed: {text}") from error
            _compare_arrived(result.digests, _tensors(model), dtype)
            reference = Reference(model)
            with _engine_errors(engine):
                samples = Samples(backend, reference.vocab_size, version)
            if samples.logprobs.mean() > CERTAIN:
                raise ValueError(f"its tiny model is certain of its tokens: log-probabilities of {samples.logprobs.mean():.2g}")
            distances = samples.distances(partial(_by_reference, reference))
            found.append(evolve(found[-1], distance=max(found[-1].distance or 0.0, float(distances.max()))))
            if dtype == "float32":
                _compare_samples(float(distances.max()), TOLERANCE, f"transformers' after refit {version}")
                by_trainer = samples.distances(partial(_by_trainer, trainer))
                _compare_samples(float(by_trainer.max()), TOLERANCE, f"the trainer's after refit {version}")
            else:
                rounding = samples.rounding(
                    partial(_by_reference, reference), partial(_by_reference, Reference(model, dtype=dtype))
                )
                mean, limit = float(distances.mean()), BFLOAT16_FACTOR * rounding
                found.append(evolve(found[-1], mean=max(found[-1].mean or 0.0, mean)))
                _compare_samples(mean, limit, f"transformers' in float32 after refit {version}, in the mean")
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
def _engine_errors(engine: TriedEngine, *, alone: bool = False) -> Iterator[None]:
    """CannotError for what the engine's own package raises, with the line of a traceback in it that says most. Where the engine
    runs `alone`, for whatever rlcore does not raise."""
    try:
        yield
    except (WrongError, spi.ModelError):
        raise
    except Exception as error:
        package = raised_in(error)
        if package == engine.package or (alone and not package.startswith("rlcore")):
            raise CannotError(engine_error(error)) from error
        raise


def raised_in(error: BaseException) -> str:
    """Return the package, by its import name, whose function raised an error or called torch or Triton that did. "" where
    neither frames nor a traceback in the error's text name one."""
    while error.__cause__ is not None:
        error = error.__cause__
    packages = _FRAME.findall(str(error))
    packages = packages or [
        str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)
    ]
    return next((package for package in reversed(packages) if package not in _CALLED), "")


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


def _compare_samples(distance: float, limit: float, whose: str) -> None:
    if not distance <= limit:
        raise WrongError(f"log-probabilities of samples {distance:.2g} from {whose}; expected at most {limit:.2g}")


def _compare_held(held: Digests, own: Digests) -> None:
    """Compare what the engine holds after refits with what its own loader makes of the files."""
    different = {name for name in held.keys() | own.keys() if held.get(name) != own.get(name)}
    if different:
        raise WrongError(f"after the refit the engine holds other tensors than its own loader makes: {_named(different)}")


def _named(names: Any) -> str:
    shown = sorted(names)
    return f"{', '.join(shown[:_MAX_NAMED])} of {len(shown)}"
