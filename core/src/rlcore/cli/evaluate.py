"""`rlcore eval`."""

import json
from pathlib import Path

import click

from rlcore.cli.arguments import as_override, progress_option, recipe_arguments


@click.command("eval")
@recipe_arguments
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A checkpoint of a run, runs/NAME/checkpoints/step-N.")
@click.option("--model", type=click.Path(path_type=Path), help="A Hugging Face model directory, as model.path.")
@click.option("--samples", type=click.IntRange(1), help="Samples of each prompt, as evaluation.samples_per_prompt.")
@click.option("--k", "ks", type=click.IntRange(1), multiple=True, help="Measure pass@K, several times for several K.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON and nothing else.")
@progress_option
@click.pass_context
def eval_command(
    context: click.Context,
    recipe: Path,
    overrides: tuple[str, ...],
    checkpoint: Path | None,
    model: Path | None,
    samples: int | None,
    ks: tuple[int, ...],
    as_json: bool,
    mode: str,
) -> None:
    """Measure a model on held-out problems.

    The recipe's model, a checkpoint of it, or another model, on the recipe's [data.evaluation]: by answers that the
    environment judges, or without one by the algorithm's figures of the rows, such as their loss.
    """
    from rlcore.cli.display import open_display
    from rlcore.run.evaluate import evaluate
    from rlcore.run.plan.channel import has_other_model
    from rlcore.run.plan.prepare import prepare, require_device

    if checkpoint is not None and model is not None:
        raise click.UsageError("--checkpoint and --model exclude each other: a checkpoint holds the weights already.")
    extra = [] if model is None else [as_override("model.path", str(model))]
    extra += [] if samples is None else [f"evaluation.samples_per_prompt={samples}"]
    extra += [f"evaluation.pass_at_k=[{', '.join(map(str, dict.fromkeys(ks)))}]"] if ks else []
    prepared = prepare(recipe, [*overrides, *extra], evaluating=True, continues=checkpoint is not None)
    if model is not None and (generator := prepared.chosen.get("generator")) is not None and has_other_model(generator):
        raise click.UsageError(
            f"--model: generator {generator.name!r} answers with the model that its own section names, and {model} would not "
            "be measured. Name another generator, or set model.path where that is to be its tokenizer."
        )
    if (ks or samples is not None) and prepared.measures_examples:
        raise click.UsageError(
            f"--samples, --k: without an [environment], algorithm {prepared.recipe.algorithm.name!r} measures the held-out "
            "rows itself, and nothing is sampled. Add the [environment] that judges answers, or leave the options out."
        )
    require_device(prepared)
    with open_display("silent" if as_json else mode, context.find_root().meta) as progress:
        metrics = evaluate(prepared, checkpoint=checkpoint, progress=progress, with_bounds=True)
    if as_json:
        click.echo(json.dumps(dict(metrics), indent=2))
        return
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        click.echo(f"{name:<{width}}  {value:.4f}")
