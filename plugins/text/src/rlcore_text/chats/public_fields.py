"""Table of the fields of rows, messages, parts, calls and tools that other libraries define, and how rlcore treats each.

The readers of rows and messages follow this table. `docs/data.md` shows it, with the libraries that define each field.
"""

from difflib import get_close_matches
from functools import cache
from typing import Literal, TypeAlias

from attrs import frozen

Level: TypeAlias = Literal["row", "message", "part", "call", "tool"]
Decision: TypeAlias = Literal["used", "refused", "reported", "no effect"]
"""Treatment of a field that has a value. A "reported" field is not read, and a note before the run names it."""

SLIP = 0.8
"""Similarity from which an unknown name counts as a misspelt one."""


@frozen
class PublicField:
    """A field that other libraries define."""

    level: Level
    names: tuple[str, ...]
    """Name of the field, and its synonyms."""
    decision: Decision
    """Treatment of the field in rows and messages that are learned, or that the core shows to the policy."""
    meaning: str
    """Effect of the field here. For a refused field: the remedy."""
    for_environment: bool = False
    """True where prompts of rewards may have this refused field. The environment gets it, and a note names it."""


FIELDS = (
    PublicField("row", ("prompt",), "used", "the policy's prompt: text, or messages"),
    PublicField("row", ("completion",), "used", "the answer to learn: text, or messages where the prompt has messages"),
    PublicField("row", ("messages",), "used", "a chat, whose answers are learned"),
    PublicField("row", ("chosen", "rejected"), "used", "answers of a preference: texts, or messages"),
    PublicField("row", ("rejected_response", "rejected_messages"), "used", "the rejected answer beside `messages`"),
    PublicField("row", ("tools",), "used", "tools that an answer may call: a list, or its JSON text"),
    PublicField("row", ("images", "image"), "used", "images for the placeholders in messages"),
    PublicField("row", ("margin",), "reported", 'read only with margin_field = "margin": how much better the chosen answer is'),
    PublicField("row", ("preferred_output", "non_preferred_output"), "refused", "write them as `chosen` and `rejected`"),
    PublicField("row", ("completions",), "refused", "join the steps of an answer as `completion`", for_environment=True),
    PublicField(
        "row",
        ("chosen_response",),
        "refused",
        "write it as `chosen`, and `rejected_response` as `rejected`",
        for_environment=True,
    ),
    PublicField("row", ("positive_messages", "negative_messages"), "reported", "examples for embeddings, which are not read"),
    PublicField(
        "row",
        tuple(
            f"{side}_{what}" for side in ("positive", "negative") for what in ("images", "videos", "audios", "tools", "objects")
        ),
        "reported",
        "they belong to examples for embeddings, which are not read",
    ),
    PublicField("row", ("teacher_prompt", "privileged_context"), "reported", "a teacher reads the policy's own prompt"),
    PublicField("row", ("rejected_images",), "refused", "preferences have no images"),
    PublicField(
        "row",
        ("rejected_tools", "rejected_videos", "rejected_audios", "rejected_objects"),
        "refused",
        "both answers of a preference are to one prompt, of text and `tools`",
    ),
    PublicField(
        "row",
        ("chat_template_kwargs", "enable_thinking"),
        "refused",
        "set model.chat_template_kwargs, which holds for all rows",
    ),
    PublicField("row", ("mm_processor_kwargs",), "reported", "images are scaled as the model's processor does"),
    PublicField("row", ("chat_template",), "refused", "set model.chat_template, which holds for all rows"),
    PublicField(
        "row",
        ("segments",),
        "refused",
        "write them as messages, with `weight` 0 for answers that are only read",
        for_environment=True,
    ),
    PublicField("row", ("channel",), "reported", "a run shows the loss of each data set of `mix` instead"),
    PublicField(
        "row",
        ("weight", "loss_weight", "loss_scale", "sample_weight", "loss_multiplier", "loss_mask"),
        "reported",
        "rows have one weight: leave rows out, or set a message's `weight` to 0",
    ),
    PublicField("row", ("functions",), "refused", "write them as `tools`"),
    PublicField("row", ("documents",), "refused", "write them into a message", for_environment=True),
    PublicField("row", ("system_prompt",), "reported", "not read: write it as the first message"),
    PublicField("row", ("system",), "refused", "write it as the first message", for_environment=True),
    PublicField("row", ("history",), "refused", "write earlier turns as messages of the prompt", for_environment=True),
    PublicField(
        "row",
        ("videos", "video", "audios", "audio", "ref_audios", "audio_codes", "objects"),
        "refused",
        "models here read text and images",
        for_environment=True,
    ),
    PublicField(
        "row",
        ("label", "kto_tag"),
        "refused",
        "a bool that marks an answer as good or bad: train with kto, or filter the rows first",
    ),
    PublicField(
        "row",
        ("input", "context"),
        "refused",
        'with prompt_field = "instruction", and reported with others: join the two texts',
    ),
    PublicField(
        "row",
        ("reasoning_content", "reasoning", "thinking", "tool_calls", "function_call"),
        "reported",
        "not read: write it into the answer's message, whose fields these are",
    ),
    PublicField("row", ("parallel_tool_calls", "tool_choice", "response_format"), "no effect", "an option of an API"),
    PublicField("row", ("agent_name", "env_class", "task_name"), "reported", "the recipe's environment plays the episode"),
    PublicField(
        "row",
        ("assistant_masks", "completion_mask", "response_mask"),
        "reported",
        "the loss covers whole answers: set a message's `weight` to 0",
    ),
    PublicField("row", ("ref_chosen_logps", "ref_rejected_logps"), "reported", "the run computes those of its own reference"),
    PublicField("row", ("input_ids", "attention_mask", "labels"), "no effect", "rlcore encodes the text itself"),
    PublicField("row", ("score_chosen", "score_rejected"), "no effect", "metadata"),
    PublicField(
        "message",
        ("role", "from"),
        "used",
        "`human` is user; `gpt`, `chatgpt`, `bot`, `model` assistant; `observation`, `tool_response` tool; `function_call`, "
        "`tool_call` the assistant's calls",
    ),
    PublicField("message", ("content", "value"), "used", "text or parts; may be null in a message with calls or a thought"),
    PublicField("message", ("tool_calls",), "used", "a list of calls, or its JSON text; the template has to show them"),
    PublicField("message", ("function_call",), "used", "one call"),
    PublicField("message", ("refusal",), "used", "the answer's text, where it has no content"),
    PublicField(
        "message",
        ("reasoning_content", "reasoning", "thinking"),
        "used",
        "the thought before an answer, passed under the name that the template reads; refused where it reads none",
    ),
    PublicField(
        "message",
        ("weight", "loss", "loss_scale", "train", "training"),
        "used",
        "0 or false: this answer is context only; null, 1 or true: it is learned",
    ),
    PublicField("message", ("prefix",), "used", "true: this last message of a prompt begins the answer"),
    PublicField("message", ("tool_call_id", "name"), "no effect", "goes to the template, which may show it"),
    PublicField("message", ("annotations",), "no effect", "metadata"),
    PublicField("message", ("train_detail",), "refused", "an answer is learned whole or not at all"),
    PublicField("message", ("reasoning_details",), "refused", "write the thought as `reasoning_content`"),
    PublicField("message", ("audio",), "refused", "models here read text and images"),
    PublicField("part", ("text",), "used", "of the types text, input_text and output_text"),
    PublicField("part", ("refusal",), "used", "of the type refusal, as text"),
    PublicField(
        "part",
        ("image", "image_url", "url", "path", "base64", "bytes"),
        "used",
        "of the types image, image_url and input_image: a path, bytes, a data: or file: URL; nothing is downloaded",
    ),
    PublicField("part", ("detail", "cache_control", "annotations", "logprobs"), "no effect", "options of an API"),
    PublicField("part", ("min_pixels", "max_pixels", "resized_height", "resized_width"), "refused", "scale the image before"),
    PublicField("part", ("file_id", "file", "video", "input_audio"), "refused", "models here read text and images"),
    PublicField("call", ("function", "name", "arguments"), "used", "`arguments` is an object, or its JSON text"),
    PublicField("call", ("id",), "used", "goes to the template, which may show it"),
    PublicField("call", ("type",), "used", "`function`; every other type is refused"),
    PublicField("call", ("index",), "no effect", "the position in a stream"),
    PublicField("tool", ("type",), "used", "`function`; every other type is refused"),
    PublicField(
        "tool", ("function", "name", "description", "parameters"), "used", "`parameters` is a JSON schema, or its text"
    ),
    PublicField("tool", ("strict", "return", "response"), "no effect", "goes to the template, which may show it"),
    PublicField("tool", ("input_schema", "inputSchema"), "refused", "write it as `parameters`"),
)


@cache
def names_of(level: Level, *decisions: Decision) -> frozenset[str]:
    """Return the names of a level's fields that have one of these decisions."""
    return frozenset(name for one in FIELDS if one.level == level and one.decision in decisions for name in one.names)


def synonyms(level: Level, name: str) -> tuple[str, ...]:
    """Return all names of a field."""
    return next(one.names for one in FIELDS if one.level == level and name in one.names)


def instead_of(level: Level, name: str) -> str:
    """Return the remedy for a refused field; "" for a field that is not in the table."""
    return next((one.meaning for one in FIELDS if one.level == level and name in one.names), "")


@cache
def misspelt_column(name: str) -> str | None:
    """Return the column that a row's field is most likely to stand for; None where the field is a known one, or like none."""
    if name in names_of("row", "used", "refused", "reported", "no effect"):
        return None
    return next(iter(get_close_matches(name.strip().lower(), names_of("row", "used"), 1, SLIP)), None)
