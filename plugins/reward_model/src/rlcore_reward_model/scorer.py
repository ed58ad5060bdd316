"""Score conversations in a separate process, which loads the reward model once."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from attrs import frozen

from rlcore.config.model import ModelConfig
from rlcore.model_files import CONFIG_FILE, read_object
from rlcore.schema.file_limits import expanded
from rlcore.spi import DataError, Message, ModelSpec, Tool
from rlcore.time_limit import TEMPLATE_S, time_limit
from rlcore_model_files.directory import END_TOKEN_FILES, eos_token_ids
from rlcore_text.rows.rendering import encode_prompt_texts, ended
from rlcore_text.tokenizers.chat_template import reads
from rlcore_text.tokenizers.template_environment import replace_environment
from rlcore_text.tokenizers.tokenizer import PretrainedTokenizer, load_tokenizer, model_file
from rlcore_text.tokenizers.turn_ends import ended_answer
from rlcore_torchkit.huggingface.safetensors_files import check_hub_files, not_finite, raise_model_problems, unknown_tensors
from rlcore_torchkit.transformers_import import import_transformers


@frozen(kw_only=True)
class Scoring:
    """The reward model, and the options by which it computes."""

    path: str
    device: str = "cpu"
    dtype: str = "float32"


@frozen(kw_only=True)
class Conversation:
    """One answer and what it answers."""

    prompt: str | Sequence[Message]
    """Text as it is, or messages for the reward model's own chat template."""
    answer: str
    tools: Sequence[Tool] = ()
    """The policy's tools, for the reward model's chat template."""


@frozen(kw_only=True)
class Failure:
    """Replaces a reward that could not be computed."""

    reason: str
    is_the_models: bool
    """True where every other answer would fail too."""


def score(scoring: Scoring, conversations: Sequence[Conversation]) -> list[float | Failure]:
    """The reward of each, or why it has none."""
    try:
        model, tokenizer = _loaded(scoring)
    except Exception as error:
        reason = f"the reward model {scoring.path} cannot be loaded: {type(error).__name__}: {error}"
        return [Failure(reason=reason, is_the_models=True)] * len(conversations)
    found = _encoded(conversations, tokenizer, getattr(model.config, "max_position_embeddings", None))
    values = iter(_values(model, [tokens for tokens in found if not isinstance(tokens, Failure)]))
    return [one if isinstance(one, Failure) else next(values) for one in found]


def encode(path: str, conversations: Sequence[Conversation]) -> list[list[int] | Failure]:
    """The tokens of each, or why it has none. Only the reward model's tokenizer is loaded, and its config.json where it is."""
    try:
        tokenizer, limit = _loaded_tokenizer(path)
    except Exception as error:
        reason = f"the tokenizer of {path} cannot be loaded: {type(error).__name__}: {error}"
        return [Failure(reason=reason, is_the_models=True)] * len(conversations)
    return _encoded(conversations, tokenizer, limit)


def _encoded(
    conversations: Sequence[Conversation], tokenizer: "RewardTokenizer", limit: int | None
) -> list[list[int] | Failure]:
    found: list[list[int] | Failure] = []
    for conversation in conversations:
        try:
            tokens = tokens_of(conversation, tokenizer)
        except Exception as error:  # of a chat template, which is a program of its own
            reason = f"the reward model's tokenizer cannot read it: {type(error).__name__}: {error}"
            found.append(Failure(reason=reason, is_the_models=not tokenizer.chat_template))
            continue
        if limit is not None and len(tokens) > limit:
            reason = f"prompt and answer have {len(tokens)} tokens of the reward model; expected at most {limit}"
            found.append(Failure(reason=reason, is_the_models=False))
            continue
        found.append(tokens)
    return found


@frozen(kw_only=True, eq=False)
class RewardTokenizer(PretrainedTokenizer):
    """A reward model's tokenizer, whose chat template may leave out messages, as some leave out the system's."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        return self._rendered(messages, tools, add_generation_prompt=True)

    def render_answered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        return self._rendered(messages, tools)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], **options: bool) -> str:
        replace_environment()
        try:
            with time_limit("the reward model's chat template", TEMPLATE_S):
                text: str = self.backend.apply_chat_template(messages, tools=list(tools) or None, tokenize=False, **options)
        except TimeoutError:
            raise
        except Exception as error:  # a template raises any exception, and callers try another form after a DataError
            raise DataError(f"the chat template refuses the messages: {error}") from error
        return text


def tokens_of(conversation: Conversation, tokenizer: RewardTokenizer) -> list[int]:
    """A conversation as a run trains reward models on it: prompt and answer are encoded apart, and the last token is the first
    of those that end the answer."""
    opened, said, is_chat = conversation.prompt, conversation.answer, False
    if not isinstance(opened, str):
        prompt, tools, is_chat = opened, conversation.tools, True
        _require_shown(prompt, tools, tokenizer.backend.get_chat_template(tools=list(tools) or None))
        opened = tokenizer.render_chat(prompt, tools)
        answered = [*prompt, {"role": "assistant", "content": said}]
        whole = tokenizer.render_answered(answered, tools)
        # Some templates show an answer that is over otherwise than one to come.
        opened = opened if whole.startswith(opened) else ""
        said = ended_answer(whole, opened, answered, tools, tokenizer)
    (read,), (answer,) = encode_prompt_texts([opened], [is_chat], tokenizer), tokenizer.encode_behind([said])
    eos = tokenizer.eos_token_id
    return [*read, *(answer if eos is None else ended(answer, tokenizer, eos, is_chat=is_chat))]


def _require_shown(messages: Sequence[Message], tools: Sequence[Tool], template: str) -> None:
    """Raise ValueError where the prompt has tools, calls or thoughts that the reward model's chat template never shows."""
    names = {name for message in messages for name in message} - {"role", "content", "name", "tool_call_id", "weight"}
    if unread := [name for name in sorted(names | ({"tools"} if tools else set())) if not reads(name, template)]:
        raise ValueError(f"found {', '.join(unread)} in the prompt, which the reward model's chat template never shows")


@cache
def _loaded(scoring: Scoring) -> tuple[Any, RewardTokenizer]:
    """Return the model and its tokenizer."""
    import_transformers()
    import torch
    from transformers import AutoModelForSequenceClassification

    check_hub_files(ModelSpec(path=scoring.path))
    tokenizer = _tokenizer(ModelConfig(path=scoring.path))
    model, report = AutoModelForSequenceClassification.from_pretrained(
        scoring.path, dtype=getattr(torch, scoring.dtype), output_loading_info=True, use_safetensors=True
    )
    if model.config.num_labels != 1:
        raise ValueError(f"found {model.config.num_labels} labels; expected 1")
    if report["missing_keys"]:
        raise ValueError(f"found no {', '.join(sorted(report['missing_keys']))} in its weights")
    unknown = set(report["unexpected_keys"]) - {"lm_head.weight"}
    unfit = [*unknown_tensors(unknown, model.config.to_dict(), scoring.path), *not_finite(model.state_dict(), scoring.path)]
    raise_model_problems(scoring.path, unfit)
    return model.to(scoring.device).eval(), tokenizer


@cache
def _loaded_tokenizer(path: str) -> tuple[RewardTokenizer, int | None]:
    """Return the tokenizer, and the most tokens that the model reads; None where no file tells."""
    import_transformers()
    content = read_object(expanded(path) / CONFIG_FILE)
    limit = content.get("max_position_embeddings") if isinstance(content, dict) else None
    return _tokenizer(ModelConfig(path=path)), limit


def _tokenizer(model: ModelConfig) -> RewardTokenizer:
    """Return the tokenizer, whose stop tokens are all special ones where the model's files list none."""
    found = load_tokenizer(model)
    settings = next(filter(None, (model_file(model, name) for name in END_TOKEN_FILES)), None)
    others = () if settings is None or eos_token_ids(settings) else found.backend.all_special_ids
    return RewardTokenizer(
        backend=found.backend,
        stop_token_ids=tuple(dict.fromkeys((*found.stop_token_ids, *others))),
        prompt_prefix=found.prompt_prefix,
        model=model,
        vocab_size=found.vocab_size,
    )


def _values(model: Any, sequences: Sequence[Sequence[int]]) -> list[float]:
    """The model's only output for each, by its own class. Sequences are padded on the right with a token that ends none of
    them, since the class takes a sequence's last other token."""
    if not sequences:
        return []
    import torch

    ends = {sequence[-1] for sequence in sequences}
    padding = next(token for token in range(len(sequences) + 1) if token not in ends)
    width = max(map(len, sequences))
    tokens = torch.tensor([[*sequence, *[padding] * (width - len(sequence))] for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in sequences])
    model.config.pad_token_id = padding
    with torch.inference_mode():
        output = model(input_ids=tokens.to(model.device), attention_mask=mask.to(model.device))
    values: list[float] = output.logits[:, 0].float().tolist()
    return values
