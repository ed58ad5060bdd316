"""The tokenizer that comes with a model directory or a model on the Hub."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from rlcore.config.model import RESERVED_TEMPLATE_ARGUMENTS, ModelConfig
from rlcore.model_files import CONFIG_FILE, config_number, image_token_id, read_object, reads_images
from rlcore.schema.file_limits import expanded
from rlcore.schema.printable import lone_surrogate
from rlcore.spi import ConfigError, DataError, ModelError, Problem
from rlcore.spi.arrays import Int32Array
from rlcore.thoughts import MARKS
from rlcore.time_limit import loading
from rlcore_model_files.directory import END_TOKEN_FILES, eos_token_ids, has_vocabulary, unreadable_files
from rlcore_model_files.images import load_image_processor
from rlcore_text.chats.images import Placeholders
from rlcore_text.chats.messages import ASSISTANT
from rlcore_text.tokenizers.chat_template import (
    DEFAULT,
    PROBE,
    PROCESSOR_FILE,
    PROCESSOR_TEMPLATE_FILE,
    ChatTemplate,
    named_templates,
    template_for,
    unread_names,
    write_templates,
)
from rlcore_text.tokenizers.hub_reach import absent_remedy, hub_problem, is_shown

MAX_NAMES = 8
"""Names that a message lists at most."""


@frozen(kw_only=True, eq=False)
class PretrainedTokenizer:
    """A `transformers` tokenizer as an rlcore.spi.Tokenizer."""

    backend: Any
    stop_token_ids: tuple[int, ...]
    prompt_prefix: tuple[int, ...]
    model: ModelConfig
    """The model that the tokenizer belongs to."""
    vocab_size: int | None
    """Tokens that the model has, by its config.json; None where that says nothing."""
    _chat: ChatTemplate = field(init=False)
    _space_before: str = field(init=False)
    """A special token behind which a text does not begin with a space of the tokenizer's own; empty where none does anyway."""
    _left_out: frozenset[int] | None = field(init=False)
    """Special tokens that a text leaves out, where marks of thoughts are special too, as Magistral's are. None: all of them."""

    @_chat.default
    def _template(self) -> ChatTemplate:
        variables = self.model.chat_template_kwargs
        return ChatTemplate(backend=self.backend, variables=variables, placeholders=cache(self._placeholders))

    def _placeholders(self) -> Placeholders | None:
        """Return the function that puts placeholders for images into prompts, where the model reads images."""
        config = model_file(self.model, CONFIG_FILE)
        content = {} if config is None else read_object(config)
        if isinstance(content, Problem) or not reads_images(content):
            return None
        token = self.show([image_token_id(content) or 0])
        model = self.model
        processor = load_image_processor(model.path, model.revision, trust_remote_code=model.trust_remote_code)
        return Placeholders(processor=processor, token=token)

    @property
    def image_token(self) -> str | None:
        """The text that stands for a part of an image in prompts; None where the model reads text alone."""
        placeholders = self._chat.placeholders()
        return None if placeholders is None else placeholders.token

    @_left_out.default
    def _special_but_thoughts(self) -> frozenset[int] | None:
        fast = getattr(self.backend, "backend_tokenizer", None)
        added = {} if fast is None else fast.get_added_tokens_decoder()
        special = {number: MARKS.fullmatch(str(token.content)) is not None for number, token in added.items() if token.special}
        return frozenset(number for number, marks in special.items() if not marks) if any(special.values()) else None

    @_space_before.default
    def _mark(self) -> str:
        fast = getattr(self.backend, "backend_tokenizer", None)  # Mistral's own tokenizers have none, and tell of no tokens
        added = None if fast is None else fast.get_added_tokens_decoder().get(self.eos_token_id)
        if added is None or added.rstrip:  # which takes white space from the text
            return ""
        mark = str(added.content)
        alone, behind = self.encode_batch(["a", f"{mark}a"])
        return mark if behind[:1] == [self.eos_token_id] and behind[1:] != alone else ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads the model's files itself: code that they bring cannot be pickled."""
        return load_tokenizer, (self.model,)

    @property
    def eos_token_id(self) -> int | None:
        return self.stop_token_ids[0] if self.stop_token_ids else None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        try:
            encoded: list[list[int]] = self.backend(
                list(texts), add_special_tokens=False, return_attention_mask=False
            ).input_ids
        except (TypeError, UnicodeEncodeError) as error:  # by the kind of tokenizer
            for text in texts:
                if half := lone_surrogate(text):
                    raise DataError(f"a text has {half}; expected Unicode text, not {text!r:.60}") from error
            raise
        return encoded

    def encode_behind(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._space_before:
            return self.encode_batch(texts)
        return [tokens[1:] for tokens in self.encode_batch([self._space_before + text for text in texts])]

    def decode(self, tokens: Sequence[int] | Int32Array) -> str:
        return self.decode_batch([tokens])[0]

    def decode_batch(self, sequences: Sequence[Sequence[int] | Int32Array]) -> list[str]:
        if not sequences:
            return []
        if self._left_out is None:
            decoded: list[str] = self.backend.batch_decode(list(sequences), skip_special_tokens=True)
        else:
            kept = [[token for token in map(int, tokens) if token not in self._left_out] for tokens in sequences]
            decoded = self.backend.batch_decode(kept, skip_special_tokens=False)
        return decoded

    def show(self, tokens: Sequence[int] | Int32Array) -> str:
        return str(self.backend.decode(tokens, skip_special_tokens=False))

    @property
    def vocabulary(self) -> Mapping[str, int]:
        found: dict[str, int] = self.backend.get_vocab()
        return found

    def save_chat_templates(self, directory: Path, variables: Mapping[str, str | bool | int | float]) -> None:
        write_templates(directory, named_templates(self.backend.chat_template), variables)

    @property
    def chat_template(self) -> str | None:
        return template_for(self.backend.chat_template, has_tools=True)

    def with_variables(self, variables: Mapping[str, Any]) -> "PretrainedTokenizer":
        """Return the tokenizer with further variables for its chat template. DataError where that reads none of a name, or the
        core itself gives it to the template."""
        if not variables:
            return self
        unread = set(unread_names(variables, self.backend.chat_template))
        if wrong := [name for name in variables if name in RESERVED_TEMPLATE_ARGUMENTS or name in unread]:
            found = ", ".join(f"{name:.40}" for name in wrong[:MAX_NAMES])
            more = f" and {len(wrong) - MAX_NAMES} more" if len(wrong) > MAX_NAMES else ""
            raise DataError(f"chat_template_kwargs: found {found}{more}; expected variables that the chat template reads")
        return evolve(self, model=evolve(self.model, chat_template_kwargs={**self.model.chat_template_kwargs, **variables}))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        return self._chat.render(messages, tools)

    def render_answered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        return self._chat.render(messages, tools, answered=True)


def load_tokenizer(model: ModelConfig) -> PretrainedTokenizer:
    """The tokenizer of a model directory or Hub name; ModelError where it has none or `transformers` is missing."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _model_error(
            f"no usable `transformers` ({error})",
            "the package that reads tokenizers",
            "Install it: pip install 'rlcore[tokenizer]'",
        ) from error
    if (problem := hub_problem(model)) is not None:
        raise ModelError([problem])
    directory = expanded(model.path)
    is_here = directory.is_dir()
    if is_here and (problems := unreadable_files(directory)):
        raise ModelError(problems)
    try:
        with loading(f"the tokenizer of {model.path}") if is_here else nullcontext():  # a Hub's may have to be fetched first
            backend = AutoTokenizer.from_pretrained(
                model.path, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
            )
        backend.chat_template = _chat_templates(backend.chat_template, model)
    except ConfigError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, JSON and Hub errors, by the kind of damage
        if not model.trust_remote_code and "trust_remote_code" in str(error) and _has_own_code(model):
            found = f"{model.path} with a tokenizer whose code comes with the model"
            remedy = "Read it, and then set model.trust_remote_code to true"
            raise _model_error(found, "a tokenizer of transformers, or code that the recipe trusts", remedy) from error
        save = "Save the tokenizer beside the weights: tokenizer.save_pretrained(directory)"
        raise _model_error(
            _what_is_there(model.path, error),
            "a Hugging Face directory with a tokenizer (tokenizer.json, tokenizer_config.json), or a name on the Hub",
            save if expanded(model.path).exists() or is_shown(model) else absent_remedy(model.path),
        ) from error
    _check_template_variables(backend.chat_template, model)
    ends = _stop_token_ids(backend, model)
    return PretrainedTokenizer(
        backend=backend,
        stop_token_ids=(*ends, *_written_end(backend, model, ends)),
        prompt_prefix=_prompt_prefix(backend),
        model=model,
        vocab_size=model_number(model, "vocab_size"),
    )


def _has_own_code(model: ModelConfig) -> bool:
    """Return whether tokenizer_config.json names a class that comes with the model."""
    file = model_file(model, "tokenizer_config.json")
    content = None if file is None else read_object(file)
    names = content.get("auto_map") if isinstance(content, dict) else None
    return bool(names) and (not isinstance(names, dict) or "AutoTokenizer" in names)


def _chat_templates(found: object, model: ModelConfig) -> str | dict[str, str] | None:
    """Return the recipe's chat template, or the tokenizer's of that name. Without one in the recipe, return all templates of
    the tokenizer, or else of its processor."""
    files = (PROCESSOR_TEMPLATE_FILE, PROCESSOR_FILE) if found is None else ()
    for file in filter(None, (model_file(model, name) for name in files)):
        content = read_object(file)
        if isinstance(content, Problem):
            raise ModelError([content])
        if file.name == PROCESSOR_TEMPLATE_FILE and content.keys() != {"chat_template"}:
            raise ValueError(f"{file.name} has {', '.join(map(repr, content)) or 'nothing'}; expected 'chat_template' alone")
        found = content.get("chat_template") if found is None else found
    settings = model_file(model, "tokenizer_config.json")
    if settings is not None and isinstance(content := read_object(settings), dict):
        named_templates(content.get("chat_template"))  # transformers passes over what else such a list holds
    named = named_templates(found)
    if (own := model.chat_template) is not None:
        if own not in named and "{" not in own:
            expected = f"the text of a Jinja template{''.join(f', or {name!r}' for name in named)}"
            raise ConfigError([Problem(path="model.chat_template", found=f"{own!r:.60}", expected=expected)])
        return named.get(own, own)
    return named.get(DEFAULT) if named.keys() <= {DEFAULT} else named


def _check_template_variables(template: object, model: ModelConfig) -> None:
    """ConfigError for variables that the template never reads, so that they would do nothing."""
    if unread := unread_names(model.chat_template_kwargs, template):
        what = "a tokenizer without a chat template" if template is None else "a chat template that never reads it"
        raise ConfigError(
            [
                Problem(path=f"model.chat_template_kwargs.{name}", found=what, expected="a variable of the template")
                for name in unread
            ]
        )


def _model_error(found: str, expected: str, remedy: str) -> ModelError:
    return ModelError([Problem(path="model.path", found=found, expected=expected, remedy=remedy)])


def _what_is_there(path: str, error: Exception) -> str:
    directory = Path(path)
    if directory.is_dir():
        names = sorted(entry.name for entry in directory.iterdir())
        listing = ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
        if not has_vocabulary(directory) and not any(name.startswith("tokenizer") for name in names):
            return f"the directory {path} without a tokenizer (it holds {listing})"
        # What transformers says of a config.json, which it reads too, is in the second line.
        reason = " ".join(str(error).split())[:300]
        return f"the directory {path} with a tokenizer that does not load ({type(error).__name__}: {reason})"
    if directory.exists():
        return f"the file {path}"
    return f"{path!r}, which is no directory here and did not load from the Hub ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _prompt_prefix(backend: Any) -> tuple[int, ...]:
    """The tokens that the tokenizer puts before a text by itself: the beginning of a sequence, or `[gMASK]<sop>`."""
    text, whole = (backend("a", add_special_tokens=is_whole).input_ids for is_whole in (False, True))
    starts = (start for start in range(len(whole)) if whole[start : start + len(text)] == text)
    return tuple(whole[: next(starts, 0)])


def _stop_token_ids(backend: Any, model: ModelConfig) -> tuple[int, ...]:
    """Return the tokenizer's end of sequence first, then those that the model's files list, each once."""
    ids: list[int] = [] if backend.eos_token_id is None else [backend.eos_token_id]
    settings = next(filter(None, (model_file(model, name) for name in END_TOKEN_FILES)), None)
    if settings is not None:
        listed = eos_token_ids(settings)
        if isinstance(listed, Problem):
            raise ModelError([listed])
        ids += listed
    return tuple(dict.fromkeys(ids))


def _written_end(backend: Any, model: ModelConfig, ends: Sequence[int]) -> list[int]:
    """Return the special token that the chat template writes behind an answer, where it writes none of `ends` there.

    Base models have such templates: their files list the end of a document alone, and the template ends turns with another.
    """
    fast = getattr(backend, "backend_tokenizer", None)
    chat = ChatTemplate(backend=backend, variables=model.chat_template_kwargs, placeholders=lambda: None)
    try:
        text = chat.render([{"role": "user", "content": "."}, {"role": ASSISTANT, "content": PROBE}], (), answered=True)
    except DataError:  # there is no template, or it takes no such messages
        return []
    behind: list[int] = backend(text.rpartition(PROBE)[2].strip(), add_special_tokens=False).input_ids
    added = {} if fast is None else fast.get_added_tokens_decoder()
    is_end = behind and behind[0] in added and added[behind[0]].special and not {*behind} & {*ends}
    return behind[:1] if is_end else []


def model_number(model: ModelConfig, name: str) -> int | None:
    """Return a positive number of a model's config.json, such as "vocab_size"; None where it has none of that name."""
    config = model_file(model, CONFIG_FILE)
    return None if config is None else config_number(str(config.parent), name)


def model_file(model: ModelConfig, name: str) -> Path | None:
    """A file of a model, fetched where that is on the Hub; None where it has none of that name. ModelError where the Hub cannot
    be reached, or shows no such model, which may be private or gated."""
    from transformers.utils import cached_file

    if (problem := hub_problem(model)) is not None:
        raise ModelError([problem])
    try:
        found = cached_file(
            model.path,
            name,
            revision=model.revision or "main",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError as error:
        found = _what_is_there(model.path, error)
        raise _model_error(found, "a model directory, or a name on the Hub", absent_remedy(model.path)) from error
    return None if found is None else Path(found)
