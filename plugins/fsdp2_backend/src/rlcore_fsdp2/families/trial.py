"""The trial of one family: its tiny random model is made, trained for a step, and sampled from."""

import json
import string
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from rlcore import spi
from rlcore.installed import installed_entry_points
from rlcore_fsdp2.families.corrections import CORRECTIONS
from rlcore_fsdp2.families.outcome import Outcome
from rlcore_fsdp2.families.reference import LENGTHS, LOSS, OPTIMIZER, Reference, make_batch
from rlcore_fsdp2.families.tiny import VOCAB_SIZE, tiny_options
from rlcore_fsdp2.provider import PROVIDER
from rlcore_torchkit.architectures.decoders import decoder_problems
from rlcore_torchkit.huggingface.class_trial import class_problems
from rlcore_torchkit.huggingface.models import quiet_transformers
from rlcore_torchkit.testing.models import make_tokenizer

MAX_LENGTH = 48
TOLERANCE = 2e-4
"""Largest distance of log-probabilities in float32."""
GRADIENT_TOLERANCE = 2e-3
"""Largest distance of a tensor's step, as a share of the step."""
RESPONSES = (14, 3, 9, 1, 6)
"""Tokens that are sampled after each prompt."""
_MAX_SHOWN = 300


class WrongError(Exception):
    """Numbers that are not those of the reference."""


def try_family(model_type: str, class_name: str, directory: Path) -> Outcome:
    """Return the outcome for the causal language model that transformers builds of `model_type`; files go to `directory`."""
    outcome = Outcome(model_type=model_type, class_name=class_name, trainer="not tried")
    torch.manual_seed(0)
    try:
        with quiet_transformers():
            problems = make_tiny(model_type, directory / "model")
    except Exception as error:  # noqa: BLE001 - whatever the class raises
        problems = _unbuildable(model_type, class_name, directory / "unbuildable")
        if not problems:
            return evolve(outcome, trainer_reason=f"no tiny model of it can be made: {_told(error)}")
    if problems:
        reason = _reason(problems)
        return evolve(outcome, trainer="refused", trainer_reason=reason, generator="refused", generator_reason=reason)
    weights: dict[str, Tensor] = {}
    with _closing() as closed:
        trainer: list[Any] = []

        def train() -> None:
            trainer.append(_build(PROVIDER, _trainer_context(directory / "model"), closed))
            weights.update(_check_step(trainer[0], directory))

        outcome = evolve(outcome, **_judged("trainer", train))
        if outcome.trainer in ("wrong", "crashed"):
            return outcome
        return evolve(outcome, **_judged("generator", lambda: _check_samples(trainer, weights, directory, closed)))


def make_tiny(model_type: str, directory: Path) -> Sequence[spi.Problem]:
    """Write a tiny random model of `model_type`, unless its configuration is refused: then returns the problems."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    make_tokenizer(directory, alphabet=string.printable[: VOCAB_SIZE - 2])
    kind = CONFIG_MAPPING[model_type]
    correction = CORRECTIONS.get(model_type, {})
    config = kind(**tiny_options(kind(), correction))
    content = config.to_dict() | {"architectures": [class_names()[model_type]]}
    if problems := list(decoder_problems(content, "config.json", trust_remote_code=False)):
        return problems
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.ndim == 1:  # norms are 1 and biases 0: they would say little
                tensor.add_(torch.linspace(-0.1, 0.1, len(tensor)))
        model(input_ids=torch.arange(2, 12)[None], use_cache=False)
    model.save_pretrained(directory)
    if not AutoConfig.from_pretrained(directory).architectures:
        raise ValueError("its configuration names no architecture")
    return []


def _unbuildable(model_type: str, class_name: str, directory: Path) -> Sequence[spi.Problem]:
    """Return the problems of a model_type whose configuration with default values is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        CONFIG_MAPPING[model_type]()
    except Exception:  # noqa: BLE001 - whatever the class raises
        make_tokenizer(directory)
        content = {"model_type": model_type, "architectures": [class_name]}
        (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
        return class_problems(spi.ModelSpec(path=str(directory)))
    return []


def _judged(role: str, check: Callable[[], None]) -> dict[str, str]:
    """Return verdict and reason of a role, by what `check` raises."""
    try:
        check()
        verdict, reason = "agrees", ""
    except spi.ModelError as error:
        verdict, reason = "refused", _reason(error.problems)
    except WrongError as error:
        verdict, reason = "wrong", str(error)
    except Exception as error:  # noqa: BLE001 - a trial finds out what else is raised
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict, reason = "crashed", f"{_told(error)} ({Path(where.filename).name}:{where.lineno})"
    return {role: verdict, f"{role}_reason": reason}


def _reason(problems: Sequence[spi.Problem]) -> str:
    return "; ".join(problem.found for problem in problems)


def class_names() -> dict[str, str]:
    """The class of each model_type that transformers has a causal language model of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


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
    from importlib import import_module

    module, _, name = str(path).partition(":")
    return getattr(import_module(module), name)


def _trainer_context(directory: Path) -> spi.TrainerContext:
    return spi.TrainerContext(
        model=spi.ModelSpec(path=str(directory), dtype="float32"),
        rank_info=spi.RankInfo(),
        seed=0,
        num_train_steps=1,
        needs_reference=False,
        max_sequence_length=MAX_LENGTH,
        optimizer=OPTIMIZER,
        schedule=spi.ScheduleSpec(),
    )


def _check_step(trainer: Any, directory: Path) -> dict[str, Tensor]:
    """Compare a step of the trainer with the reference's; returns the weights after it."""
    reference, batch = Reference(directory / "model"), make_batch(VOCAB_SIZE - 16)
    alone = [batch.select(np.array([number])) for number in range(len(LENGTHS))]
    with torch.no_grad():
        expected = reference.logprobs(batch).numpy()
    before = reference.saved(directory / "before")
    _compare("log-probabilities of packed sequences", _logprobs(trainer, [batch], 0), expected)
    _compare("log-probabilities of single sequences", _logprobs(trainer, alone, 0), expected)
    loss, norm = reference.step(batch)
    microbatches = tuple(batch.select(np.array(group)) for group in ([0, 4], [1, 2, 3]))
    request = spi.TrainStepRequest(
        microbatches=microbatches, counts=batch.counts(), loss=LOSS, temperature=1.0, weight_version=0
    )
    result = trainer.train_step(request)
    for name, found, wanted in (("loss", result.loss, loss), ("grad_norm", result.grad_norm, norm)):
        if not abs(found - wanted) <= 1e-3 * max(1.0, abs(wanted)):
            raise WrongError(f"{name} {found:.6g} where transformers has {wanted:.6g}")
    export = trainer.export_weights(spi.ExportWeightsRequest(weight_version=1, dtype="float32", max_bucket_bytes=2**20))
    found_weights = {named.name: named.tensor.clone() for bucket in export.buckets for named in bucket.tensors}
    _compare_steps(before, found_weights, reference.saved(directory / "after"))
    return found_weights


def _compare(what: str, found: np.ndarray, expected: np.ndarray) -> None:
    distance = float(np.abs(found - expected).max())
    if not distance <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise WrongError(f"{what} {distance:.2g} from those of transformers")


def _logprobs(trainer: Any, batches: Sequence[spi.TokenBatch], version: int) -> np.ndarray:
    request = spi.LogprobsRequest(
        microbatches=tuple(batches), model="policy", temperature=1.0, entropy=False, weight_version=version
    )
    return np.concatenate(trainer.get_logprobs(request).logprobs)


def _compare_steps(before: Mapping[str, Tensor], found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if found.keys() != expected.keys():
        different = sorted(found.keys() ^ expected.keys())
        raise WrongError(f"tensors {', '.join(different[:3])} of {len(different)} that one side alone has")
    steps = {name: (tensor - before[name]).float() for name, tensor in expected.items()}
    largest = max(step.norm().item() for step in steps.values())
    for name, tensor in expected.items():
        distance = (found[name].float() - tensor.float()).norm().item()
        if not distance <= GRADIENT_TOLERANCE * max(steps[name].norm().item(), 1e-3 * largest):
            raise WrongError(f"{name} {distance:.2g} from transformers' after a step of {steps[name].norm().item():.2g}")


def _check_samples(trainer: Sequence[Any], weights: Mapping[str, Tensor], directory: Path, closed: list[Any]) -> None:
    """Compare samples' log-probabilities with the trainer's; where that refuses the model, with the reference's."""
    (point,) = installed_entry_points().entry_points.select(group="rlcore.generators", name="transformers")
    context = spi.GeneratorContext(
        model=spi.ModelSpec(path=str(directory / "model"), dtype="float32"),
        rank_info=spi.RankInfo(),
        seed=0,
        max_sequence_length=MAX_LENGTH,
        channel="in_process" if weights else None,
    )
    generator = _build(point.load(), context, closed)
    version = 0
    if weights:
        version = 1
        export = trainer[0].export_weights(spi.ExportWeightsRequest(weight_version=1, dtype="float32", max_bucket_bytes=2**20))
        generator.refit(spi.RefitRequest(weight_version=1, channel="in_process", weights=export, may_alias=False))
    batch = make_batch(VOCAB_SIZE - 16)
    prompts = np.split(batch.tokens, batch.offsets[1:-1])
    request = spi.GenerateRequest(
        prompts=spi.RaggedTokens.from_lists([prompt.tolist() for prompt in prompts]),
        num_samples=1,
        seeds=np.arange(len(prompts)),
        max_tokens=np.array(RESPONSES, np.int32),
        sampling=spi.SamplingParams(temperature=1.0),
        weight_version=version,
    )
    result = generator.generate(request)
    responses = np.split(result.tokens, result.offsets[1:-1])
    sequences = [np.concatenate([prompt, response]) for prompt, response in zip(prompts, responses, strict=True)]
    expected = _expected(trainer, sequences, directory, version)
    starts = np.cumsum([0, *(len(sequence) for sequence in sequences)])
    rows = [expected[start + len(prompt) : stop] for start, stop, prompt in zip(starts, starts[1:], prompts, strict=False)]
    _compare("log-probabilities of samples", result.logprobs, np.concatenate(rows))


def _expected(trainer: Sequence[Any], sequences: Sequence[np.ndarray], directory: Path, version: int) -> np.ndarray:
    offsets = np.cumsum([0, *(len(sequence) for sequence in sequences)]).astype(np.int64)
    tokens = np.concatenate(sequences).astype(np.int32)
    batch = spi.TokenBatch(tokens=tokens, offsets=offsets, loss_mask=np.zeros(len(tokens), np.bool_))
    if trainer:
        return _logprobs(trainer[0], [batch], version)
    with torch.no_grad():
        return Reference(directory / "model").logprobs(batch).numpy()
