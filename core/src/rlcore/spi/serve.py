"""Serving a model over HTTP: what `rlcore serve` hands to the generator that does it."""

from typing import Literal

from attrs import frozen

from rlcore.spi.context import ModelSpec


@frozen(kw_only=True)
class ServeRequest:
    """Serve a model until the process is interrupted."""

    model: ModelSpec
    """`path` is a local Hugging Face directory with weights, or a name on the Hub."""
    device: Literal["cpu", "cuda"]
    host: str
    port: int
    name: str
    """What clients call the model."""
    max_sequence_length: int | None
    """Prompt and response together, in tokens; None takes the model's own limit."""
    chat_template: str | None = None
    """A Jinja chat template in place of the tokenizer's own."""
