"""`rlcore export`."""

from pathlib import Path
from typing import Literal

import click

from rlcore.schema.printable import printable


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint of this step, in place of the newest one.")
@click.option(
    "--form",
    type=click.Choice(["hf", "peft"]),
    default="hf",
    show_default=True,
    help="hf: the model in the Hugging Face format, adapters merged. peft: the adapters alone, in PEFT's format.",
)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="The folder to write; by default in RUN/weights/step-N.")
def export_command(run: Path, step: int | None, form: Literal["hf", "peft"], output: Path | None) -> None:
    """Write a checkpoint as a model of transformers, or as PEFT's adapters.

    RUN is a run directory, whose recipe names the model. The trainer that wrote the checkpoint reads it on the CPU.
    """
    from rlcore.config.load import read_raw
    from rlcore.gpu import detect_device
    from rlcore.run.data.text import tokenizers
    from rlcore.run.plan.sections import convert_recipe
    from rlcore.run.storage.checkpoint import newest_checkpoint, require_intact
    from rlcore.spi import CheckpointError, ConfigError, Problem
    from rlcore_serve.exporting import export_checkpoint
    from rlcore_serve.serving import RECIPE, named_checkpoint

    if not (run / RECIPE).is_file():
        raise ConfigError([Problem(path="RUN", found=str(run), expected=f"a run directory, with a {RECIPE}")])
    recipe, registry = convert_recipe(read_raw(run / RECIPE, ()), None)
    if form == "peft" and recipe.lora is None:
        expected = "hf: the run trains no adapters"
        raise ConfigError([Problem(path="--form", found="peft, of a run without [lora]", expected=expected)])
    if step is None:
        checkpoint = newest_checkpoint(run / "checkpoints", lambda text: click.echo(f"note: {printable(text)}", err=True))
    else:
        checkpoint = require_intact(named_checkpoint(run, str(step), "--step"))
    if checkpoint is None:
        raise CheckpointError(f"{run} holds no checkpoint; expected a run that has saved one")
    final = output or run / "weights" / checkpoint.name / {"hf": "model", "peft": "adapter"}[form]
    if final.exists():
        expected = "a folder to be made: remove it, or name another one by --output"
        raise ConfigError([Problem(path="--output", found=f"{final}, which exists", expected=expected)])
    device = recipe.run.device if recipe.run.device != "auto" else detect_device()
    has_template = form == "hf" and (recipe.model.chat_template is not None or recipe.model.chat_template_kwargs)
    tokenizer = tokenizers().load_tokenizer(recipe.model) if has_template else None
    export_checkpoint(recipe, registry, device, checkpoint, final, kind=form, tokenizer=tokenizer)
    click.echo(str(final))
