"""Fields of rows, messages, contents and calls that have a public meaning, and what becomes of each.

`docs/data.md` shows this table, with those who define the fields; rows and messages are read by it.
"""

from functools import cache
from typing import Literal, TypeAlias

from attrs import frozen

Level: TypeAlias = Literal["row", "message", "part", "call", "tool"]
Decision: TypeAlias = Literal["used", "refused", "told", "no effect"]
"""What becomes of a field that has a value: "told" is a note before the run."""


@frozen
class PublicField:
    """A field with a public meaning."""

    level: Level
    names: tuple[str, ...]
    """The field, and others of the same meaning."""
    decision: Decision
    """What becomes of it where its row or message is learned, or shown to the policy by the core."""
    meaning: str
    """What it does here; of one that is refused, what to do instead."""
    for_environment: bool = False
    """Whether rows that are prompts of rewards may have it: the environment gets it, and a note says so."""


FIELDS = (
    PublicField("row", ("prompt",), "used", "what the policy reads: text, or messages"),
    PublicField(
        "row", ("completion",), "used", "what is learned from demonstrations: text, or messages behind a prompt of messages"
    ),
    PublicField("row", ("messages",), "used", "a chat, whose answers are learned"),
    PublicField("row", ("chosen", "rejected"), "used", "answers of a preference: texts, or messages"),
    PublicField("row", ("rejected_response", "rejected_messages"), "used", "the rejected answer beside `messages`"),
    PublicField("row", ("tools",), "used", "what may be called: a list of tools, or its JSON text"),
    PublicField("row", ("images", "image"), "used", "images that messages leave places for"),
    PublicField("row", ("margin",), "told", 'how much better the chosen answer is: margin_field = "margin"'),
    PublicField("row", ("preferred_output", "non_preferred_output"), "refused", "write them as `chosen` and `rejected`"),
    PublicField("row", ("completions",), "refused", "join the steps of an answer as `completion`", for_environment=True),
    PublicField("row", ("positive_messages", "negative_messages"), "told", "examples for embeddings: they are not read"),
    PublicField("row", ("rejected_images",), "refused", "preferences have no images"),
    PublicField(
        "row",
        ("chat_template_kwargs", "enable_thinking"),
        "refused",
        "variables of the template stand in model.chat_template_kwargs, one value for all rows",
    ),
    PublicField("row", ("functions",), "refused", "write them as `tools`"),
    PublicField("row", ("documents",), "refused", "write them into a message", for_environment=True),
    PublicField("row", ("system_prompt",), "told", "no message of a chat: it is not read"),
    PublicField("row", ("system",), "refused", "write it as the first message", for_environment=True),
    PublicField("row", ("history",), "refused", "write earlier turns as messages of the prompt", for_environment=True),
    PublicField(
        "row",
        ("videos", "video", "audios", "audio", "objects"),
        "refused",
        "models here read text and images",
        for_environment=True,
    ),
    PublicField("row", ("label",), "refused", "a bool says that an answer is good or bad: filter the rows first"),
    PublicField("row", ("input", "context"), "refused", 'behind prompt_field = "instruction": join the two texts'),
    PublicField("row", ("parallel_tool_calls",), "no effect", "how an API answers"),
    PublicField(
        "row", ("assistant_masks", "completion_mask"), "told", "answers are learned whole; `weight` of a message leaves one out"
    ),
    PublicField("row", ("ref_chosen_logps", "ref_rejected_logps"), "told", "the run computes those of its own reference"),
    PublicField("row", ("input_ids", "attention_mask", "labels"), "no effect", "tokens are made of the text"),
    PublicField("row", ("score_chosen", "score_rejected"), "no effect", "metadata"),
    PublicField(
        "message",
        ("role", "from"),
        "used",
        "`human` is user; `gpt`, `chatgpt`, `bot`, `model` assistant; `observation`, `tool_response` tool; `function_call`, "
        "`tool_call` the assistant's calls",
    ),
    PublicField("message", ("content", "value"), "used", "text or parts; null beside calls or a thought"),
    PublicField("message", ("tool_calls",), "used", "a list of calls, or its JSON text; the template has to show it"),
    PublicField("message", ("function_call",), "used", "one call"),
    PublicField("message", ("refusal",), "used", "the answer's text in place of its content"),
    PublicField(
        "message",
        ("reasoning_content", "reasoning", "thinking"),
        "used",
        "the thought before an answer, under the name that the template reads; refused where it reads none",
    ),
    PublicField(
        "message",
        ("weight", "loss", "train", "training"),
        "used",
        "0 or false: this answer is read and not learned; null, 1 or true: it is learned",
    ),
    PublicField("message", ("prefix",), "used", "true: the last message of a prompt is the beginning of the answer"),
    PublicField("message", ("tool_call_id", "name"), "no effect", "goes to the template, which may show it"),
    PublicField("message", ("annotations",), "no effect", "metadata"),
    PublicField("message", ("train_detail",), "refused", "an answer is learned whole or not at all"),
    PublicField("message", ("loss_scale",), "refused", "an answer is learned whole or not at all"),
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
    PublicField("part", ("detail", "cache_control", "annotations", "logprobs"), "no effect", "how an API computes"),
    PublicField("part", ("min_pixels", "max_pixels", "resized_height", "resized_width"), "refused", "scale the image"),
    PublicField("part", ("file_id", "file", "video", "input_audio"), "refused", "models here read text and images"),
    PublicField("call", ("function", "name", "arguments"), "used", "arguments: an object, or its text"),
    PublicField("call", ("id",), "used", "goes to the template, which may show it"),
    PublicField("call", ("type",), "used", "`function`; every other type is refused"),
    PublicField("call", ("index",), "no effect", "the place in a stream"),
    PublicField("tool", ("type",), "used", "`function`; every other type is refused"),
    PublicField("tool", ("function", "name", "description", "parameters"), "used", "parameters: a JSON schema, or its text"),
    PublicField("tool", ("strict", "return", "response"), "no effect", "goes to the template, which may show it"),
    PublicField("tool", ("input_schema", "inputSchema"), "refused", "write it as `parameters`"),
)


@cache
def names_of(level: Level, *decisions: Decision) -> frozenset[str]:
    """The names of a level's fields with one of these decisions."""
    return frozenset(name for one in FIELDS if one.level == level and one.decision in decisions for name in one.names)


def synonyms(level: Level, name: str) -> tuple[str, ...]:
    """The names of a field."""
    return next(one.names for one in FIELDS if one.level == level and name in one.names)


def instead_of(level: Level, name: str) -> str:
    """What to do in place of a field that is refused; empty for one that nobody defines."""
    return next((one.meaning for one in FIELDS if one.level == level and name in one.names), "")
