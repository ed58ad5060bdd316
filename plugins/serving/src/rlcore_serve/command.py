"""`rlcore serve`."""

import contextlib
from collections.abc import Mapping
from typing import Any

import click

from rlcore.schema.printable import printable
from rlcore.secrets import keep_secret, masked
from rlcore.spi import ConfigError, Problem


@click.command("serve")
@click.argument("target", metavar="RUN_OR_MODEL")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--checkpoint", metavar="step-N", help="A checkpoint of the run, in place of its exported model or its newest one."
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every one of the machine."
)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port to listen on.")
@click.option("--name", help="What clients call the model; by default the name of the run or of the model.")
@click.option("--generator", metavar="PLUGIN", help="The generator that serves; by default the run's own.")
@click.option(
    "--api-key",
    envvar="RLCORE_API_KEY",
    show_envvar=True,
    metavar="KEY",
    help="What clients have to show; by default everyone is answered.",
)
@click.option(
    "--train",
    is_flag=True,
    help="RUN_OR_MODEL is a recipe: clients of the tinker API train and sample its model. A key is made where none is given.",
)
@click.option(
    "--max-length", type=click.IntRange(min=2), help="Most tokens of prompt and answer; by default the model's limit."
)
def serve_command(
    target: str,
    overrides: tuple[str, ...],
    checkpoint: str | None,
    host: str,
    port: int,
    name: str | None,
    generator: str | None,
    api_key: str | None,
    train: bool,
    max_length: int | None,
) -> None:
    """Serve a model over HTTP.

    RUN_OR_MODEL is a run directory, one of its checkpoints, a Hugging Face model directory or a name on the Hub. Of a run,
    the exported model is served, or else its newest checkpoint, which is exported first. KEY=VALUE overrides a key of the run's
    recipe, such as the generator's options. With --train RUN_OR_MODEL is a recipe.

    Ctrl-C and SIGTERM end it.
    """
    from rlcore.run.interrupt import ended_by_sigterm
    from rlcore_serve.serving import check_address, find_target, prepare_serving, serve, served_model

    keep_secret(api_key or "")
    source = click.get_current_context().get_parameter_source("api_key")
    if source is click.core.ParameterSource.COMMANDLINE:
        _note("warning: everyone here can read the key in the list of processes. Set RLCORE_API_KEY in place of --api-key")
    check_address(host, port)
    if train:
        _serve_training(
            {"--checkpoint": checkpoint, "--generator": generator, "--max-length": max_length},
            recipe=target,
            overrides=overrides,
            host=host,
            port=port,
            name=name,
            api_key=api_key,
        )
        return
    serving = prepare_serving(find_target(target, checkpoint, _note), overrides, generator)
    with contextlib.suppress(KeyboardInterrupt), ended_by_sigterm():
        model = served_model(serving, _note)
        entry = serving.generator
        _note(f"serving {model} on http://{host}:{port} with {entry.name} {entry.version} of {entry.distribution}")
        serve(serving, model, host=host, port=port, name=name, max_sequence_length=max_length, api_key=api_key, note=_note)


def _serve_training(unread: Mapping[str, object], **asked: Any) -> None:
    """Serve a recipe for training. `unread` are options that it does not take."""
    from rlcore.run.interrupt import ended_by_sigterm
    from rlcore_serve.training_server import TrainingServerContext, serve_training

    given = [name for name, value in unread.items() if value is not None]
    if given:
        found, expected = f"{', '.join(given)} with --train", "keys of the recipe, such as generator.name=vllm, in their place"
        raise ConfigError([Problem(path="--train", found=found, expected=expected)])
    with contextlib.suppress(KeyboardInterrupt), ended_by_sigterm():
        serve_training(TrainingServerContext(**asked, note=_note, tell=lambda text: click.echo(printable(text), err=True)))


def _note(text: str) -> None:
    click.echo(printable(masked(text)), err=True)
