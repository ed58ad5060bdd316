"""Serving with a generator that has no server of its own: OpenAI's API in front of its stream."""

from attrs import evolve

from rlcore import spi
from rlcore.config.recipe import Recipe
from rlcore.gpu import Device
from rlcore.model_files import config_number
from rlcore.registry.binding import build_generator, build_trainer
from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.registry.selection import select
from rlcore.run.data.tokenizer import load_tokenizer
from rlcore.run.execution.in_process import InProcessRoute
from rlcore.run.execution.shutdown import closed_after
from rlcore.run.execution.streams import run_stream
from rlcore.run.plan.channel import choose_channel
from rlcore.run.plan.sections import plugin_config
from rlcore.run.protocols import RefitCommand
from rlcore.run.rollout.session_sampler import SessionSampler
from rlcore.sessions.served_model import ServedModel
from rlcore.sessions.server import serving
from rlcore.sessions.session import Session, Sessions

VERSION = 0


def serve_generator(request: spi.ServeRequest, recipe: Recipe, registry: Registry, generator: Entry) -> None:
    """Serve until the process is interrupted: every client that reaches the address, without recording anything.

    The trainer that the recipe names reads the model, hands its weights to the generator, and is closed."""
    model = evolve(recipe.model, path=request.model.path, chat_template=request.chat_template)
    tokenizer = load_tokenizer(evolve(model, chat_template_kwargs={}))
    limit = request.max_sequence_length or config_number(request.model.path, "max_position_embeddings")
    if limit is None:
        found = "nothing, and no max_position_embeddings in the model's config.json"
        raise spi.ConfigError([spi.Problem(path="--max-length", found=found, expected="a number of tokens")])
    trainer = select(registry, "trainer", recipe.trainer.name, device=request.device, needs={})
    channel = choose_channel(recipe, {"trainer": trainer, "generator": generator}, request.device, registry)
    assert channel is not None
    context = spi.GeneratorContext(
        model=request.model, rank_info=spi.RankInfo(device=request.device), seed=0, max_sequence_length=limit, channel=channel
    )
    handle = build_generator(generator, context, plugin_config(recipe, generator))
    with closed_after(handle):
        _bring_weights(request.model, recipe, trainer, handle, request.device, channel)
        sampler = SessionSampler()
        assert generator.provider is not None
        served = ServedModel(
            name=request.name,
            tokenizer=tokenizer,
            sampler=sampler,
            max_sequence_length=limit,
            sampling=spi.SamplingParams(stop_token_ids=tokenizer.stop_token_ids),
            capabilities=generator.provider.capabilities,
            vocab_size=tokenizer.vocab_size,
        )
        anonymous = Session(token="", record=None)
        with serving(served, Sessions(anonymous), host=request.host, port=request.port):
            sampler.feed.begin(VERSION)
            try:
                run_stream(handle, tokenizer, sampler.feed, VERSION)
            finally:
                sampler.close()


def _bring_weights(
    model: spi.ModelSpec, recipe: Recipe, entry: Entry, generator: GeneratorHandle, device: Device, channel: str
) -> None:
    """Let a trainer read the model's weights, and hand copies of them to the generator."""
    assert entry.provider is not None
    context = spi.TrainerContext(
        model=model,
        rank_info=spi.RankInfo(device=device),
        seed=0,
        num_train_steps=1,
        needs_reference=False,
        max_sequence_length=recipe.rollout.max_sequence_length,
        optimizer=recipe.optimizer,
        schedule=recipe.schedule,
    )
    trainer = build_trainer(entry, context, entry.provider.config())
    with closed_after(trainer):
        export = spi.ExportWeightsRequest(
            weight_version=VERSION, dtype=model.dtype, max_bucket_bytes=recipe.refit.max_bucket_mib * 2**20
        )
        order = RefitCommand(export=export, channel=channel, may_alias=False)
        InProcessRoute(trainer=trainer, generator=generator).sync_weights(order)
