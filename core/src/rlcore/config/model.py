"""The section `[model]`: the policy, and what its chat template gets."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from attrs import field, frozen

from rlcore.schema.constraints import KNOWN_HOME, Constraint, not_empty

RESERVED_TEMPLATE_ARGUMENTS = (
    "messages",
    "conversation",
    "chat_template",
    "tools",
    "documents",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
"""Arguments of transformers' apply_chat_template, which are no variables for a recipe to set."""

_NOT_RESERVED = Constraint(
    "without what the core itself gives to the template",
    lambda value: not value.keys() & set(RESERVED_TEMPLATE_ARGUMENTS),
    f"Leave out {', '.join(RESERVED_TEMPLATE_ARGUMENTS)}.",
)
TemplateVariables: TypeAlias = Annotated[Mapping[str, str | bool | int | float], _NOT_RESERVED]


@frozen(kw_only=True)
class ModelConfig:
    """`[model]`: the policy, and the frozen reference where one is needed and [reference] names no other."""

    path: Annotated[str, not_empty("Give a local Hugging Face directory or a name on the Hub."), KNOWN_HOME]
    """A local Hugging Face directory, or a name on the Hub."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; "auto" is bfloat16 on CUDA and float32 on CPU. Master weights are float32 in any case."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""
    chat_template: Annotated[str, not_empty("Leave the key out for the tokenizer's own template.")] | None = None
    """Jinja chat template in place of the tokenizer's, or the name of one of the tokenizer's templates."""
    chat_template_kwargs: TemplateVariables = field(factory=dict)
    """Variables that the chat template reads, such as enable_thinking = false for Qwen3's. A template that asks for the date is
    told 26 July 2024, so that prompts are the same on any day; Llama's take another one from a variable date_string."""


@frozen(kw_only=True)
class ReferenceConfig:
    """`[reference]`: the frozen model that an algorithm compares the policy with, where it is not the policy's beginning: a
    teacher, say, or the model that earlier training began with. It has the policy's tokenizer, and any size."""

    path: Annotated[str, not_empty("Give a local Hugging Face directory or a name on the Hub."), KNOWN_HOME]
    """A local Hugging Face directory, or a name on the Hub. It computes in model.dtype."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    trainer: Mapping[str, str | bool | int | float] = field(factory=dict)
    """With cluster.reference_gpus_per_node, options of the trainer's plugin for this model in place of those in its section of
    [trainer], such as tensor_parallel for a teacher that one device cannot hold."""
