"""Exports a checkpoint of a run as a Hugging Face directory, or its adapters as PEFT's."""

import shutil
from pathlib import Path
from typing import Literal

from attrs import evolve

from rlcore import spi
from rlcore.config.recipe import Recipe
from rlcore.files import storage_errors
from rlcore.gpu import Device
from rlcore.registry.binding import build_trainer
from rlcore.registry.discovery import Registry
from rlcore.registry.handle import closed_after
from rlcore.registry.selection import select
from rlcore.run.plan.run_plan import model_spec
from rlcore.run.storage.checkpoint import read_loop_state
from rlcore.run.storage.saver import model_digest


def export_checkpoint(
    recipe: Recipe,
    registry: Registry,
    device: Device,
    checkpoint: Path,
    final: Path,
    *,
    kind: Literal["hf", "peft"] = "hf",
    mark: tuple[str, str] | None = None,
    tokenizer: spi.Tokenizer | None = None,
) -> None:
    """Write the model of a checkpoint as the directory `final`, there only once it is whole.

    `mark` names a further file of it, and its text; `tokenizer` has the chat template to write beside the model. The trainer
    that wrote the checkpoint works on the CPU, so that the devices are left to others.
    """
    state = read_loop_state(checkpoint)
    here = model_digest(recipe.model.path, recipe.model.revision)
    if state.model != here:
        raise spi.CheckpointError(
            f"{checkpoint} belongs to another model: the digest there is {state.model:.12}; {recipe.model.path} has {here:.12}"
        )
    needs = {spi.capabilities.SAVE_HF: "a checkpoint is exported"}
    if recipe.lora is not None:
        needs[spi.capabilities.LORA] = "[lora] trained adapters"
    entry = select(registry, "trainer", state.trainer, device=device, needs=needs)
    assert entry.provider is not None
    context = spi.TrainerContext(
        model=model_spec(recipe, device),
        rank_info=spi.RankInfo(device="cpu"),
        seed=recipe.run.seed,
        num_train_steps=recipe.run.num_steps * recipe.training.updates_per_step,
        needs_reference=False,
        max_sequence_length=recipe.rollout.max_sequence_length,
        optimizer=recipe.optimizer,
        schedule=recipe.schedule,
        lora=None if recipe.lora is None else evolve(recipe.lora, init_from=None),  # the checkpoint has what they are now
    )
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # Its section divides the run's ranks, of which there is one here; what a checkpoint holds does not depend on that.
    trainer = build_trainer(entry, context, entry.provider.config())
    try:
        with closed_after(trainer):
            trainer.load_state(spi.LoadStateRequest(directory=checkpoint / "trainer"))
            with storage_errors("the exported checkpoint", final.parent):
                partial.mkdir(parents=True)
                trainer.save_state(spi.SaveStateRequest(directory=partial, kind=kind))
                if tokenizer is not None:
                    tokenizer.save_chat_templates(partial, recipe.model.chat_template_kwargs)
                if mark is not None:
                    (partial / mark[0]).write_text(mark[1])
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
