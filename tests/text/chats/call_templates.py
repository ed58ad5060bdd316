"""Chat templates that show calls of tools as those of model families do, and end turns as these do."""

import json
from pathlib import Path

from attrs import frozen

from rlcore_torchkit.testing.models import make_tokenizer

from .chat_templates import begun_answer, set_chat_template, shown_tools  # type: ignore[import-not-found]

QWEN_CALLS = (
    shown_tools("<|im_start|>system\n", "<|im_end|>\n")
    + """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
    + begun_answer("<|im_start|>assistant\n")
)

LLAMA_CALLS = (
    "{{- bos_token }}\n"
    + shown_tools("<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n", "<|eot_id|>")
    + """\
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- {'name': call.name, 'parameters': call.arguments} | tojson }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
"""
    + begun_answer("<|start_header_id|>assistant<|end_header_id|>\n\n")
)

MISTRAL_CALLS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if loop.last and tools %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS]' + message.tool_calls | tojson + eos_token }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
"""Shows tools with the last user's message, and so not twice in the same place."""

GLM_4 = (
    "{{- '[gMASK]<sop>' }}\n"
    + shown_tools("<|system|>\n")
    + """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|observation|>\\n' + message.content }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<|assistant|>' + call.function.name + '\\n' + call.function.arguments | tojson }}
        {%- endfor %}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
"""
    + begun_answer("<|assistant|>")
)

GLM_4_5 = (
    "{{- '[gMASK]<sop>' }}\n"
    + shown_tools("<|system|>\n# Tools\n")
    + """\
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
    {%- set last.user = loop.index0 if message.role == 'user' else last.user %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|observation|>' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1] if '</think>' in message.content else '' %}
        {%- set said = message.content.split('</think>')[-1] | trim %}
        {{- '<|assistant|>\\n<think>' + (thought if loop.index0 > last.user else '') + '</think>' }}
        {%- if said %}
            {{- '\\n' + said }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' ~ value ~ '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
"""
    + begun_answer("<|assistant|>")
)

GEMMA_4 = (
    "{{- bos_token }}\n"
    + shown_tools("<|turn>system\n", "<turn|>\n")
    + """\
{%- set state = namespace(before='') %}
{%- for message in messages %}
    {%- if message.role != 'tool' %}
    {%- set place, results = loop.index0, namespace(number=0, over=false) %}
    {%- set state.before = '' %}
    {%- if message.role != 'assistant' or messages[place - 1].role != 'tool' %}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call>call:' + call.function.name + call.function.arguments | tojson + '<tool_call|>' }}
        {%- set state.before = 'call' %}
    {%- endfor %}
    {%- for later in messages[place + 1:] %}
        {%- if later.role != 'tool' %}
            {%- set results.over = true %}
        {%- elif not results.over and message.tool_calls %}
            {{- '<|tool_response>response{value:' + later.content + '}<tool_response|>' }}
            {%- set results.number, state.before = results.number + 1, 'result' %}
        {%- endif %}
    {%- endfor %}
    {{- message.content | trim }}
    {%- if state.before == 'call' %}
        {{- '<|tool_response>' }}
    {%- elif not results.number or message.content %}
        {{- '<turn|>\\n' }}
    {%- endif %}
    {%- endif %}
{%- endfor %}
"""
    + begun_answer("<|turn>model\n", unless="state.before")
)


@frozen(kw_only=True)
class CallFamily:
    """A family whose template shows calls, and how its turns end."""

    template: str
    ends: tuple[str, ...]
    """The tokens that end a turn, that of its tokenizer first; of several, generation_config.json lists all."""
    after_answer: str
    """The one that ends an answer."""
    unlisted: str = ""
    """A special token of the template's that no file lists as an end."""
    after_call: str
    """The one that ends a turn with calls."""


GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
CALL_FAMILIES = {
    "qwen": CallFamily(template=QWEN_CALLS, ends=("<|im_end|>",), after_answer="<|im_end|>", after_call="<|im_end|>"),
    "qwen base": CallFamily(
        template=QWEN_CALLS, ends=("<|endoftext|>",), unlisted="<|im_end|>", after_answer="<|im_end|>", after_call="<|im_end|>"
    ),
    "llama": CallFamily(template=LLAMA_CALLS, ends=("<|eot_id|>",), after_answer="<|eot_id|>", after_call="<|eot_id|>"),
    "mistral": CallFamily(template=MISTRAL_CALLS, ends=("</s>",), after_answer="</s>", after_call="</s>"),
    "glm4": CallFamily(template=GLM_4, ends=GLM_ENDS, after_answer="<|user|>", after_call="<|observation|>"),
    "glm4 of its first end": CallFamily(
        template=GLM_4, ends=GLM_ENDS[1:], after_answer="<|user|>", after_call="<|observation|>"
    ),
    "glm4.5": CallFamily(template=GLM_4_5, ends=GLM_ENDS, after_answer="<|user|>", after_call="<|observation|>"),
    "gemma4": CallFamily(
        template=GEMMA_4, ends=("<turn|>", "<|tool_response>"), after_answer="<turn|>", after_call="<|tool_response>"
    ),
}


def make_family(directory: Path, family: CallFamily) -> None:
    """Write a tokenizer with a family's template and ends."""
    from tokenizers import Tokenizer

    make_tokenizer(directory)
    set_chat_template(directory, family.template, family.ends[0])
    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    unlisted = [family.unlisted] if family.unlisted else []
    tokenizer.add_special_tokens([*family.ends, *unlisted, "<|assistant|>", "<|system|>", "<|tool_call>", "<tool_call|>"])
    tokenizer.save(str(file))
    ends = [tokenizer.token_to_id(end) for end in family.ends]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
