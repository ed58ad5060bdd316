"""What the process that scores does: it loads the reward model once, and gives each text its value."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from attrs import frozen

from rlcore.spi import Message
from rlcore.transformers_import import import_transformers


@frozen(kw_only=True)
class Scoring:
    """Which model scores, and how it computes."""

    path: str
    device: str
    dtype: str


@frozen(kw_only=True)
class Conversation:
    """One answer and what it answers."""

    prompt: str | Sequence[Message]
    """Text as it is, or messages for the reward model's own chat template."""
    answer: str


@frozen(kw_only=True)
class Failure:
    """In place of a reward."""

    reason: str
    is_the_models: bool
    """Whether every other answer would fail too."""


def score(scoring: Scoring, conversations: Sequence[Conversation]) -> list[float | Failure]:
    """The reward of each, or why it has none."""
    try:
        model, tokenizer = _loaded(scoring)
    except Exception as error:
        reason = f"the reward model {scoring.path} cannot be loaded: {type(error).__name__}: {error}"
        return [Failure(reason=reason, is_the_models=True)] * len(conversations)
    limit = getattr(model.config, "max_position_embeddings", None)
    found: list[float | Failure] = []
    sequences: dict[int, list[int]] = {}
    for number, conversation in enumerate(conversations):
        try:
            tokens = tokens_of(conversation, tokenizer)
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


def tokens_of(conversation: Conversation, tokenizer: Any) -> list[int]:
    """A conversation as reward models are trained on it: the token that ends an answer is its last."""
    prompt, eos = conversation.prompt, tokenizer.eos_token_id
    if isinstance(prompt, str):
        begun = [token for token in tokenizer("").input_ids if token == tokenizer.bos_token_id][:1]
        parts = [tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, conversation.answer)]
        tokens = [*(begun if parts[0][:1] != begun else []), *parts[0], *parts[1]]
    else:
        messages = [*prompt, {"role": "assistant", "content": conversation.answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip()
        tokens = list(tokenizer(text, add_special_tokens=False).input_ids)
    is_ended = tokens[-1:] == [eos] or (not isinstance(prompt, str) and tokens[-1] in tokenizer.all_special_ids)
    return tokens if is_ended or eos is None else [*tokens, eos]


@cache
def _loaded(scoring: Scoring) -> tuple[Any, Any]:
    import_transformers()
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(scoring.path)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        scoring.path, dtype=getattr(torch, scoring.dtype), output_loading_info=True
    )
    if model.config.num_labels != 1:
        raise ValueError(f"found {model.config.num_labels} labels; expected 1")
    if report["missing_keys"]:
        raise ValueError(f"found no {', '.join(sorted(report['missing_keys']))} in its weights")
    return model.to(scoring.device).eval(), tokenizer


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
