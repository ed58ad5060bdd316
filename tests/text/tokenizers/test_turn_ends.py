"""What is learned of a chat is what transformers writes of it, with the token that ends each answer once."""

import itertools

import pytest

from rlcore.config.data import DatasetConfig
from rlcore.config.model import ModelConfig
from rlcore.spi import DataError, Observation
from rlcore_text.chats.conversations import Conversations
from rlcore_text.rows.assistant_masked_chats import render_chats
from rlcore_text.rows.preferences import render_preferences
from rlcore_text.rows.prompts import render_demonstrations
from rlcore_text.tokenizers.tokenizer import load_tokenizer

from ..chats.call_templates import CALL_FAMILIES, make_family  # type: ignore[import-not-found]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]
USER, RESULT = {"role": "user", "content": "2+2?"}, {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "4"}
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
ANSWER, MORE = {"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Sure?"}
CHATS = {
    "an answer": [USER, ANSWER],
    "two answers": [USER, ANSWER, MORE, ANSWER],
    "a call": [USER, CALL],
    "a call and its answer": [USER, CALL, RESULT, ANSWER],
    "a call, its answer and another": [USER, CALL, RESULT, ANSWER, MORE, ANSWER],
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The tokenizer of a family."""
    directories = {name: tmp_path_factory.mktemp("family") for name in CALL_FAMILIES}
    for name, family in CALL_FAMILIES.items():
        make_family(directories[name], family)
    return lambda name, **options: load_tokenizer(ModelConfig(path=str(directories[name]), **options))


def learned(rows, tokenizer, **options):
    chats = render_chats(rows, tokenizer, DatasetConfig(), key="data.train", max_tokens=10_000, history="refuse", **options)
    return chats.tokens.sequence(0).tolist(), chats.learned.tolist()


def runs(tokens, mask, tokenizer):
    """What is learned, in text, a piece a turn."""
    pieces = itertools.groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.show([token for token, _ in piece]) for is_learned, piece in pieces if is_learned]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", CALL_FAMILIES)
def test_a_chat_is_learned_as_transformers_writes_it(load, name, chat):
    family, tokenizer, messages = CALL_FAMILIES[name], load(name), CHATS[chat]
    tools = TOOLS if CALL in messages and name != "mistral" else []
    tokens, mask = learned([{"messages": messages, "tools": tools}], tokenizer)
    last = family.after_call if messages[-1] is CALL else family.after_answer
    whole = tokenizer.backend.apply_chat_template(messages, tools=tools or None, tokenize=False).rstrip()
    expected = whole if whole.endswith(last) else whole + last
    assert tokenizer.show(tokens) == expected
    assert tokens == tokenizer.encode(expected)
    ends = [family.after_call if message is CALL else family.after_answer for message in messages if message in (CALL, ANSWER)]
    pieces = runs(tokens, mask, tokenizer)
    assert len(pieces) == len(ends)
    assert all(piece.endswith(end) and piece.count(end) == 1 for piece, end in zip(pieces, ends, strict=True))


def test_an_answer_ends_where_its_template_takes_its_thought_away_later(load):
    tokenizer = load("glm4.5")
    answer = {"role": "assistant", "content": "<think>two and two</think>It is 4."}
    for messages in ([USER, answer], [USER, answer, MORE, ANSWER]):
        examples = render_chats(
            [{"messages": messages}], tokenizer, DatasetConfig(), key="data.train", max_tokens=999, history="segment"
        )
        first = examples.tokens.sequence(0).tolist()
        assert tokenizer.show(first).endswith("<|assistant|>\n<think>two and two</think>\nIt is 4.<|user|>")
        assert examples.tokens.num_sequences == len(messages) // 2


ALTERNATES = """\
{%- for message in messages %}
    {%- if loop.index0 and message.role == messages[loop.index0 - 1].role %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
{%- endfor %}
"""


@pytest.mark.parametrize("alternates", [False, True])
@pytest.mark.parametrize("name", CALL_FAMILIES)
def test_preferences_and_completions_end_as_answers_of_chats_do(load, name, alternates):
    family = CALL_FAMILIES[name]
    tokenizer = load(name, chat_template=ALTERNATES + family.template) if alternates else load(name)
    limits = {"key": "data.train", "max_prompt_tokens": 999, "max_response_tokens": 999}
    begun = [USER, evolve_content(ANSWER, "<think>")]
    rows = [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [evolve_content(ANSWER, "5")]},
        {"prompt": [USER], "chosen": "4", "rejected": "5"},
        {"prompt": begun, "chosen": "4", "rejected": "5"},
    ]
    pairs = render_preferences(rows, tokenizer, DatasetConfig(), **limits).tokens
    completed = [
        render_demonstrations([{"prompt": prompt, "completion": "4"}], tokenizer, DatasetConfig(), **limits).tokens
        for prompt in ([USER], begun)
    ]
    for tokens in (*map(pairs.sequence, range(6)), *(one.sequence(0) for one in completed)):
        shown = tokenizer.show(tokens)
        assert shown.endswith(family.after_answer)
        assert not any(shown.removesuffix(family.after_answer).endswith(end) for end in family.ends)


@pytest.mark.parametrize("name", ["qwen", "llama", "glm4", "glm4.5"])
def test_content_beside_calls_is_learned_or_the_row_refused(load, name):
    tokenizer, said = load(name), CALL | {"content": "I add."}
    rows = [{"messages": [USER, said], "tools": TOOLS}]
    pairs = [{"prompt": [USER], "chosen": [said], "rejected": [ANSWER], "tools": TOOLS}]
    limits = {"key": "data.train", "max_prompt_tokens": 999, "max_response_tokens": 999}
    if name in ("llama", "glm4"):
        with pytest.raises(DataError, match="message 1: 'I add.'"):
            learned(rows, tokenizer)
        with pytest.raises(DataError, match="an answer: 'I add.'"):
            render_preferences(pairs, tokenizer, DatasetConfig(), **limits)
        return
    assert "I add." in runs(*learned(rows, tokenizer), tokenizer)[0]
    assert "I add." in tokenizer.show(render_preferences(pairs, tokenizer, DatasetConfig(), **limits).tokens.sequence(0))


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize(
    ("shown", "left_out"),
    [
        ("m.content.split('</think>')[-1].lstrip()", "Well."),
        ("m.content.split('<think>')[0]", "two"),
        ("'<think>' + m.content.split('<think>')[-1]", "Well."),
        ("m.content | trim", None),
        ("m.content.split('<think>')[0] + '<think>\n' + m.content.split('<think>')[-1]", None),
    ],
)
def test_a_thought_within_an_answer_is_learned_or_the_row_refused(tokenizer_directory, shown, left_out, calls):
    answers = f"{{% if m.tool_calls %}}{{{{ m.tool_calls[0].function.name }}}}{{% endif %}}{{{{ {shown} }}}}"
    template = TURNS.replace("ANSWER", answers).replace("BEGIN", "")
    tokenizer = load_tokenizer(ModelConfig(path=str(tokenizer_directory), chat_template=template))
    answer = {"role": "assistant", "content": "Well.<think>two</think>4", **({"tool_calls": CALLS} if calls else {})}
    limits = {"key": "data.train", "max_prompt_tokens": 999, "max_response_tokens": 999}
    pairs = [{"prompt": [USER], "chosen": [answer], "rejected": [ANSWER]}]
    for learn in (
        lambda: learned([{"messages": [USER, answer]}], tokenizer)[0],
        lambda: render_preferences(pairs, tokenizer, DatasetConfig(), **limits).tokens.sequence(0),
    ):
        if left_out is None:
            assert all(text in tokenizer.show(learn()) for text in ("Well.", "two", "4"))
        else:
            with pytest.raises(DataError, match=f"'{left_out}'"):
                learn()
    if not calls:
        learned([{"messages": [USER, answer | {"weight": 0}, MORE, ANSWER]}], tokenizer)  # it is only read


def evolve_content(message, content):
    return message | {"content": content}


@pytest.mark.parametrize("name", [name for name in CALL_FAMILIES if name != "mistral"])
def test_an_episode_reads_and_says_what_is_learned(load, name):
    family, tokenizer = CALL_FAMILIES[name], load(name)
    tokens, mask = learned([{"messages": CHATS["two answers"]}], tokenizer)
    pieces = runs(tokens, mask, tokenizer)
    conversations = Conversations(tokenizer, tokenizer.stop_token_ids)
    conversations.begin([0], Observation(messages=(USER,)))
    said = tokenizer.encode_behind(pieces)
    conversations.add_turn(0, tokenizer.decode(said[0]), said[0][-1])
    ((read, begins_segment),) = conversations.read([0], [Observation(messages=(MORE,))])
    assert not begins_segment
    opened = tokenizer.encode(tokenizer.render_chat([USER]))
    assert [*opened, *said[0], *read.tolist(), *said[1]] == tokens
    assert said[1][-1] == tokenizer.encode(family.after_answer)[0]


def test_a_template_that_ends_no_turn_gets_the_end_of_sequence(tokenizer):
    completed = render_demonstrations(
        [{"prompt": [USER], "completion": text} for text in ("4", "4<|end|>")],
        tokenizer,
        DatasetConfig(),
        key="data.train",
        max_prompt_tokens=99,
        max_response_tokens=99,
    ).tokens
    shown = [tokenizer.show(completed.sequence(number)).partition("assistant: ")[2] for number in range(2)]
    assert shown == ["4<|end|>", "4<|end|>"]


TURNS = "{%- for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}ANSWER<|end|>{% else %}{{ m.content }}"
TURNS += "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>BEGIN{% endif %}"


@pytest.mark.parametrize(
    ("answer", "begin", "learned"),
    [
        ("<r>{{ m.content }}</r>", "<r>", "It is 4.</r><|end|>"),
        ("</think>\n\n{{ m.content }}", "", "</think>\n\nIt is 4.<|end|>"),
        ("<think>\n\n</think>\n\n{{ m.content }}", "<think>\n", "\n</think>\n\nIt is 4.<|end|>"),
        ("{{ m.content }}", "<think>\n", None),
        ("{{ m.content.split('</think>')[-1] }}", "", "It is 4.<|end|>"),
    ],
)
def test_a_text_behind_messages_is_learned_as_the_message_is(tokenizer_directory, answer, begin, learned):
    template = TURNS.replace("ANSWER", answer).replace("BEGIN", begin)
    tokenizer = load_tokenizer(ModelConfig(path=str(tokenizer_directory), chat_template=template))
    limits = {"key": "data.train", "max_prompt_tokens": 999, "max_response_tokens": 999}
    row = {"prompt": [USER], "completion": "It is 4.", "chosen": "It is 4.", "rejected": "5"}

    def texts(row):
        completed = render_demonstrations([row], tokenizer, DatasetConfig(), **limits).tokens
        compared = render_preferences([row], tokenizer, DatasetConfig(), **limits).tokens
        return [tokenizer.show(one.sequence(0)).partition(f"<assistant>{begin}")[2] for one in (completed, compared)]

    if learned is None:
        with pytest.raises(DataError, match="row 0 .*'It is 4.'"):
            texts(row)
        thought = "2 and 2</think>It is 4."
        assert texts({**row, "completion": thought, "chosen": thought, "rejected": "5</think>5"}) == [f"{thought}<|end|>"] * 2
    else:
        assert texts(row) == [learned] * 2
