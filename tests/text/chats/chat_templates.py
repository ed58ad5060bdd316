"""Chat templates that treat messages and tools as those of model families do, and a tokenizer that has their special tokens."""

import json
from pathlib import Path

from attrs import frozen


def begun_answer(opening: str, unless: str = "false") -> str:
    """The end of a template: the beginning of an answer, where it is asked for."""
    return f"{{%- if add_generation_prompt and not {unless} %}}\n    {{{{- {opening!r} }}}}\n{{%- endif %}}\n"


def shown_tools(begin: str, end: str = "") -> str:
    """Return the part of a template that shows all tools as JSON."""
    return f"{{%- if tools %}}\n    {{{{- {begin!r} + tools | tojson + {end!r} }}}}\n{{%- endif %}}\n"


QWEN_TOOLS = """\
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nAnswer within <tool_call></tool_call>.<|im_end|>\\n' }}
"""
"""What can be called, at the end of the system message, and how."""

QWEN_ENDING = """\
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
"""
"""What tools answer, the end of the messages, and the beginning of the next turn."""

QWEN2_5 = (
    """
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else 'You are Qwen. You are a helpful assistant.' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + system + '\\n\\n' }}
"""
    + QWEN_TOOLS
    + """{%- else %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
"""
    + QWEN_ENDING
    + "{%- endif %}\n"
)

LLAMA_3_1 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}
    {{- 'Environment: ipython\n' }}
{%- endif %}
{{- 'Today Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nCall {"name": function, "parameters": object} of:\n\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\n\n' }}
    {%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
""" + begun_answer("<|start_header_id|>assistant<|end_header_id|>\n\n")

GEMMA_2 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
""" + begun_answer("<start_of_turn>model\n")

GEMMA_3 = """\
{{- bos_token }}
{%- set prefix = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set prefix = messages[0]['content'] + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
""" + begun_answer("<start_of_turn>model\n")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    + CHATML
)

LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + "
    "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

QWEN3 = (
    """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
"""
    + QWEN_TOOLS
    + """{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
"""
    + QWEN_ENDING
    + """    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
)

SPECIAL_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|python_tag|>"),
)


@frozen(kw_only=True)
class Family:
    """A family's template, and what it does."""

    template: str
    end: str
    """The token that ends a turn."""
    system: bool = True
    """Whether a conversation may begin with a system message."""
    results: bool = True
    """Whether it takes messages of tools."""
    form: str | None = None
    """How it has the policy call the tools that it shows; None where it shows none."""
    keeps_thoughts: bool = True
    """Whether the thought of a turn stays once a user answers."""


FAMILIES = {
    "chatml": Family(template=CHATML, end="<|im_end|>"),
    "smollm2": Family(template=SMOLLM2, end="<|im_end|>"),
    "qwen2.5": Family(template=QWEN2_5, end="<|im_end|>", form="hermes"),
    "qwen3": Family(template=QWEN3, end="<|im_end|>", form="hermes", keeps_thoughts=False),
    "llama3": Family(template=LLAMA_3, end="<|eot_id|>"),
    "llama3.1": Family(template=LLAMA_3_1, end="<|eot_id|>", form="llama3_json"),
    "gemma2": Family(template=GEMMA_2, end="<end_of_turn>", system=False, results=False),
    "gemma3": Family(template=GEMMA_3, end="<end_of_turn>", results=False),
}


def set_chat_template(directory: Path, template: str, end: str) -> None:
    """Give a tokenizer the special tokens of these families, one of their templates and its end of a turn."""
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(file))
    settings_file = directory / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    settings |= {"chat_template": template, "eos_token": end, "bos_token": "<|begin_of_text|>"}
    settings_file.write_text(json.dumps(settings))


CALLING = """\
{%- if tools %}{{- 'TOOLS:' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + ARGUMENTS + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
CALLING_FORMS = {
    "objects": CALLING.replace("ARGUMENTS", "(call.function.arguments | tojson)"),
    "texts": CALLING.replace("ARGUMENTS", "call.function.arguments"),
}
"""Templates that show thoughts, tools and calls: one reads arguments as objects, as Qwen's, one as texts, as DeepSeek's."""
