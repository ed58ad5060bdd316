"""Score conversations in a separate process, which loads the reward model once."""

import re
from collections.abc import Container, Sequence
from contextlib import suppress
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

from rlcore.spi import Message, ModelSpec, Problem, Tool
from rlcore.time_limit import TEMPLATE_S, time_limit
from rlcore_model_files.directory import END_TOKEN_FILES, eos_token_ids
from rlcore_torchkit.huggingface.safetensors_files import check_hub_files, not_finite, raise_model_problems, unknown_tensors
from rlcore_torchkit.transformers_import import import_transformers

TODAY = date(2024, 7, 26)
"""The date that chat templates get on every day, in training too."""


@frozen(kw_only=True)
class Scoring:
    """The reward model, and the options by which it computes."""

    path: str
    device: str
    dtype: str


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
        model, tokenizer, ends = _loaded(scoring)
    except Exception as error:
        reason = f"the reward model {scoring.path} cannot be loaded: {type(error).__name__}: {error}"
        return [Failure(reason=reason, is_the_models=True)] * len(conversations)
    limit = getattr(model.config, "max_position_embeddings", None)
    found: list[float | Failure] = []
    sequences: dict[int, list[int]] = {}
    for number, conversation in enumerate(conversations):
        try:
            tokens = tokens_of(conversation, tokenizer, ends)
        except Exception as error:  # of a chat template, which is a program of its own
            reason = f"the reward model's tokenizer cannot read it: {type(error).__name__}: {error}"
            found.append(Failure(reason=reason, is_the_models=not getattr(tokenizer, "chat_template", None)))
            continue
        if limit is not None and len(tokens) > limit:
            reason = f"prompt and answer have {len(tokens)} tokens of the reward model; expected at most {limit}"
            found.append(Failure(reason=reason, is_the_models=False))
            continue
        sequences[number] = tokens
        found.append(0.0)
    for number, value in zip(sequences, _values(model, list(sequences.values())), strict=True):
        found[number] = value
    return found


def tokens_of(conversation: Conversation, tokenizer: Any, ends: Container[int]) -> list[int]:
    """A conversation as a run trains reward models on it: prompt and answer are encoded apart, and the last token is the first
    of those that end the answer. `ends` are, besides the tokenizer's own, the tokens that end an answer of a chat."""
    prompt, eos = conversation.prompt, tokenizer.eos_token_id
    if isinstance(prompt, str):
        begun = [token for token in tokenizer("").input_ids if token == tokenizer.bos_token_id][:1]
        read = _encoded(prompt, tokenizer)
        read = read if read[:1] == begun else [*begun, *read]
        said = _encoded_behind(conversation.answer, tokenizer)
        return [*read, *said] if eos is None or said[-1:] == [eos] else [*read, *said, eos]
    _require_shown(prompt, conversation.tools, tokenizer.get_chat_template(tools=list(conversation.tools) or None))
    opened = _shown(prompt, conversation.tools, tokenizer, add_generation_prompt=True)
    answered = [*prompt, {"role": "assistant", "content": conversation.answer}]
    whole = _shown(answered, conversation.tools, tokenizer).rstrip()
    # Some templates show an answer that is over otherwise than one to come.
    opened = opened if whole.startswith(opened) else ""
    read, said = _encoded(opened, tokenizer), _encoded_behind(whole[len(opened) :], tokenizer)
    return [
        *read,
        *(_until_end(said, tokenizer, ends) or [*said, *_following_end(answered, conversation.tools, tokenizer, ends)]),
    ]


def _require_shown(messages: Sequence[Message], tools: Sequence[Tool], template: str) -> None:
    """Raise ValueError where the prompt has tools, calls or thoughts that the reward model's chat template never shows."""
    names = {name for message in messages for name in message} - {"role", "content", "name", "tool_call_id", "weight"}
    if unread := [name for name in sorted(names | ({"tools"} if tools else set())) if not re.search(rf"\b{name}\b", template)]:
        raise ValueError(f"found {', '.join(unread)} in the prompt, which the reward model's chat template never shows")


def _shown(messages: Sequence[Message], tools: Sequence[Tool], tokenizer: Any, **options: bool) -> str:
    """Render messages and tools with the chat template, with the same fixed date as in every run."""
    today = {"strftime_now": TODAY.strftime} if "strftime_now" in str(tokenizer.chat_template) else {}
    with time_limit("the reward model's chat template", TEMPLATE_S):
        text: str = tokenizer.apply_chat_template(messages, tools=list(tools) or None, tokenize=False, **today, **options)
    return text


def _encoded(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _encoded_behind(text: str, tokenizer: Any) -> list[int]:
    """Without the space that some tokenizers put before a text, and none in its middle."""
    eos = tokenizer.eos_token_id
    mark = getattr(tokenizer, "added_tokens_decoder", {}).get(eos)
    if mark is not None and not mark.rstrip:  # which takes white space from the text
        tokens = _encoded(f"{mark.content}{text}", tokenizer)
        if tokens[:1] == [eos]:
            return tokens[1:]
    return _encoded(text, tokenizer)


def _following_end(answered: Sequence[Message], tools: Sequence[Tool], tokenizer: Any, ends: Container[int]) -> list[int]:
    """Return the token that ends the last answer, as a list.

    It is the first token of the user's reply where that ends an answer, as in GLM's templates, else the tokenizer's end of
    sequence. A template may render an answer differently once a user has replied. The token is then found by another answer.
    """
    with suppress(Exception):  # of a chat template that takes no further message
        for answer in (answered[-1], {"role": "assistant", "content": "."}):
            whole = _shown([*answered[:-1], answer], tools, tokenizer).rstrip()
            following = _shown([*answered[:-1], answer, {"role": "user", "content": "."}], tools, tokenizer)
            first = _encoded(following[len(whole) :].lstrip(), tokenizer)[:1] if following.startswith(whole) else []
            if first and first[0] in ends:
                return first
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _until_end(said: list[int], tokenizer: Any, ends: Container[int]) -> list[int]:
    """Return an answer's tokens up to its first end token, since some templates write two; empty without one."""
    eos, end = tokenizer.eos_token_id, None
    for index in range(len(said) - 1, -1, -1):
        if said[index] == eos or said[index] in ends:
            end = index + 1
        elif tokenizer.decode([said[index]], skip_special_tokens=True).strip():
            break
    return said[:end] if end is not None else []


@cache
def _loaded(scoring: Scoring) -> tuple[Any, Any, tuple[int, ...]]:
    """Return the model, its tokenizer, and the tokens that end an answer.

    The first existing file of END_TOKEN_FILES lists them. Where it lists none, they are all special tokens.
    """
    import_transformers()
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import cached_file

    check_hub_files(ModelSpec(path=scoring.path))
    tokenizer = AutoTokenizer.from_pretrained(scoring.path)
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
    files = (cached_file(scoring.path, name, _raise_exceptions_for_missing_entries=False) for name in END_TOKEN_FILES)
    ends = eos_token_ids(Path(next(filter(None, files))))
    if isinstance(ends, Problem):
        raise ValueError(str(ends))
    return model.to(scoring.device).eval(), tokenizer, ends or tuple(tokenizer.all_special_ids)


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
