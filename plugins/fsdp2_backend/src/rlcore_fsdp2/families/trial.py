"""The trial of a model: it is trained for a step and sampled from, and its numbers are compared."""

from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from rlcore import spi
from rlcore_fsdp2.families.checks import check_samples, check_step
from rlcore_fsdp2.families.images import ImageReference, make_tiny_image_model
from rlcore_fsdp2.families.outcome import Outcome
from rlcore_fsdp2.families.reference import TrainedReference
from rlcore_torchkit.architectures.decoders import IMAGE_MODELS, has_states, is_described
from rlcore_torchkit.architectures.image_faults import image_fault
from rlcore_torchkit.forward.decoder_forward import has_own_attention
from rlcore_torchkit.huggingface.models import quiet_transformers
from rlcore_torchkit.testing.families.backends import (
    build,
    closing,
    error_text,
    generator_context,
    installed_provider,
    judged,
    problems_text,
    trainer_context,
)
from rlcore_torchkit.testing.families.corrections import UNTRIED
from rlcore_torchkit.testing.families.tiny_model import make_tiny


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
        reason = problems_text(error)
        return evolve(outcome, trainer="refused", trainer_reason=reason, generator="refused", generator_reason=reason)
    except Exception as error:
        return evolve(outcome, trainer_reason=f"no tiny model of it can be made: {error_text(error)}")
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
        with closing() as closed:
            trainer = build(installed_provider("trainers", "fsdp2"), trainer_context(model), closed)
            check_step(trainer, ImageReference(model), scratch)

    with quiet_transformers():
        verdict, reason = judged(train)
        return evolve(outcome, trainer=verdict, trainer_reason=reason)


def try_model(directory: Path, scratch: Path, *, trust_remote_code: bool = False, trainer: str = "fsdp2") -> Outcome:
    """Return the outcome for the model in `directory`, of any size and family, with an installed trainer; files go to
    `scratch`."""
    model = spi.ModelSpec(path=str(directory), dtype="float32", trust_remote_code=trust_remote_code)
    return _tried(Outcome(model_type=str(directory), class_name=""), model, scratch, trainer)


def _tried(outcome: Outcome, model: spi.ModelSpec, scratch: Path, trainer: str = "fsdp2") -> Outcome:
    trainers: list[Any] = []
    ways: list[str] = []
    with closing() as closed:

        def train() -> None:
            trainers.append(build(installed_provider("trainers", trainer), trainer_context(model), closed))
            ways.append(_way(trainers[0].policy) if trainer == "fsdp2" else trainer)
            check_step(trainers[0], TrainedReference(model), scratch)

        def generate() -> None:
            provider = installed_provider("generators", "transformers")
            generator = build(provider, generator_context(model, "in_process" if trainers else None), closed)
            check_samples(generator, trainers[0] if trainers else None, model)

        verdict, reason = judged(train)
        outcome = evolve(outcome, trainer=verdict, trainer_reason=reason, way="".join(ways))
        if verdict in ("wrong", "crashed"):
            return outcome
        verdict, reason = judged(generate)
        return evolve(outcome, generator=verdict, generator_reason=reason)


def _way(model: Any) -> str:
    """Return how the trainer computes a model, in a few words."""
    if is_described(model):
        return "its description"
    if has_own_attention(model):
        return "its own attention"
    return "packed attention and states" if has_states(model) else "packed attention"
