"""A generator behind OpenAI's API: the server of sessions in front of its stream, with nothing recorded."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from attrs import evolve, frozen

from rlcore import spi
from rlcore.config.model import ModelConfig
from rlcore.gpu import Device
from rlcore.model_files import CONFIG_FILE, config_number
from rlcore.registry.binding import build_generator
from rlcore.registry.discovery import Entry
from rlcore.registry.generator_handle import OWN_VERSION
from rlcore.registry.handle import closed_after
from rlcore.registry.provider_calls import engine_tool_parser, run_check
from rlcore.run.execution.streams import run_stream
from rlcore.run.plan.checks import raise_problems
from rlcore_model_files.directory import GENERATION_FILE
from rlcore_serve.sampling_defaults import sampling_defaults
from rlcore_serve.sessions.sampler import SessionSampler
from rlcore_serve.sessions.served_model import ServedModel
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Session, Sessions
from rlcore_serve.sessions.tools import SessionTools
from rlcore_text.chats.tool_calls import ToolParser
from rlcore_text.tokenizers.hub_reach import absent_remedy
from rlcore_text.tokenizers.tokenizer import PretrainedTokenizer, load_tokenizer, model_file

Note = Callable[[str], None]


@frozen(kw_only=True)
class Address:
    """The address of a served model, and its API key."""

    host: str
    port: int
    name: str
    """The name of the model in requests."""
    api_key: str | None
    """The API key that clients have to send; None lets in all."""


def serve_generator(
    entry: Entry,
    config: object,
    *,
    model: spi.ModelSpec,
    chat: ModelConfig,
    device: Device,
    address: Address,
    tool_parser: str,
    max_sequence_length: int | None,
    note: Note,
) -> None:
    """Serve `model` until the process is interrupted. `chat` is it as a recipe names it, with its chat template, and
    `tool_parser` what reads the calls of tools.

    ModelError or ConfigError where generator and model do not fit, before either is loaded."""
    chat = evolve(chat, path=model.path, revision=model.revision)
    limit = max_sequence_length or _own_limit(chat, entry)
    checked = spi.CheckContext(model=model, device=device, world_size=1, max_sequence_length=limit)
    for known in raise_problems(run_check(entry, checked, config), model):
        note(str(known))
    tokenizer = load_tokenizer(chat)
    parser = ToolParser.named(tool_parser, tokenizer.chat_template, partial(engine_tool_parser, entry, model))
    rank_info = spi.RankInfo(device=device)
    logs = Path(tempfile.mkdtemp(prefix="rlcore-serve-"))  # which stays, since errors name logs
    context = spi.GeneratorContext(
        model=model, rank_info=rank_info, seed=0, max_sequence_length=limit, channel=None, log_directory=logs
    )
    handle = build_generator(entry, context, config)
    with closed_after(handle):
        sampler = SessionSampler(tokenizer.decode, streams_tokens=handle.has(spi.capabilities.TOKEN_STREAMING))
        served = evolve(_served(entry, address.name, tokenizer, parser, sampler, limit, note), engine_logs=logs)
        everyone = Session(token=address.api_key or "", record=None)
        with serving(served, Sessions(everyone), host=address.host, port=address.port) as url:
            note(f"{address.name} answers on {url}/v1; Ctrl-C ends it")
            sampler.requests.begin(OWN_VERSION)
            try:
                run_stream(handle, tokenizer, sampler.requests, OWN_VERSION)
            finally:
                sampler.close()


def _own_limit(model: ModelConfig, entry: Entry) -> int:
    """The most tokens that a model is made for, by its config.json; ModelError where it is not there, on the Hub neither."""
    reads_model = entry.provider is not None and entry.provider.reads_model
    try:
        config = model_file(model, CONFIG_FILE)
    except spi.ModelError as error:
        if reads_model:
            raise spi.ModelError([evolve(problem, path="RUN_OR_MODEL") for problem in error.problems]) from error
        config = None
    if config is None and reads_model:
        found = f"{model.path!r}, which is no directory here and did not load from the Hub"
        expected = "a run directory, a model directory, or a name on the Hub"
        problem = spi.Problem(path="RUN_OR_MODEL", found=found, expected=expected, remedy=absent_remedy(model.path))
        raise spi.ModelError([problem])
    limit = None if config is None else config_number(str(config.parent), "max_position_embeddings")
    if limit is None:
        found = "nothing, and no max_position_embeddings in the model's config.json"
        raise spi.ConfigError([spi.Problem(path="--max-length", found=found, expected="a number of tokens")])
    return limit


def _served(
    entry: Entry,
    name: str,
    tokenizer: PretrainedTokenizer,
    parser: ToolParser | None,
    sampler: SessionSampler,
    limit: int,
    note: Note,
) -> ServedModel:
    assert entry.provider is not None
    able = entry.provider.capabilities
    sampling, notes = sampling_defaults(model_file(tokenizer.model, GENERATION_FILE), able)
    for line in notes:
        note(line)
    tools = SessionTools.of(parser, tokenizer.chat_template)
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        sampler=sampler,
        max_sequence_length=limit,
        sampling=evolve(sampling, stop_token_ids=tokenizer.stop_token_ids),
        capabilities=able,
        vocab_size=tokenizer.vocab_size,
        parse=tools.parse,
        tool_form=tools.form,
        shows_tools=tools.is_in_template,
        note=note,
    )
