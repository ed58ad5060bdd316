"""Whole chats to learn from: the template's own text, of which the assistant's turns and their ends are learned."""

import itertools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_support import require_source

from rlcore.config.data import DatasetConfig
from rlcore.config.model import ModelConfig
from rlcore.run.data.examples import example_batch
from rlcore.spi import DataError
from rlcore_text.rows.assistant_masked_chats import are_chats, render_chats
from rlcore_text.rows.datasets import load_rows
from rlcore_text.rows.given_rows import given_rows
from rlcore_text.tokenizers.tokenizer import load_tokenizer
from rlcore_torchkit.testing.models import make_tokenizer

from ..chats.chat_templates import CALLING_FORMS, FAMILIES, set_chat_template  # type: ignore[import-not-found]

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "6, I think."},
]
THOUGHTFUL = [
    CHAT[1],
    {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\n4"},
    CHAT[3],
    {"role": "assistant", "content": "<think>\nthree and three\n</think>\n\n6"},
]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The tokenizer of a family."""
    directories = {}
    for name, family in FAMILIES.items():
        directories[name] = tmp_path_factory.mktemp("family")
        make_tokenizer(directories[name])
        set_chat_template(directories[name], family.template, family.end)
    return lambda family: load_tokenizer(ModelConfig(path=str(directories[family])))


def render(rows, tokenizer, *, max_tokens=10_000, history="refuse", **config):
    return render_chats(rows, tokenizer, DatasetConfig(**config), key="data.train", max_tokens=max_tokens, history=history)


def learned_of(examples, tokenizer, sequence):
    """The texts that a sequence has to learn, each with its end."""
    start, end = examples.tokens.offsets[sequence : sequence + 2]
    tokens, mask = examples.tokens.tokens[start:end], examples.learned[start:end]
    runs = itertools.groupby(zip(tokens.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1])
    return [tokenizer.show([token for token, _ in run]) for is_learned, run in runs if is_learned]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.keeps_thoughts])
def test_a_familys_chat_is_its_templates_text_and_its_answers_are_learned(load, name):
    family, tokenizer = FAMILIES[name], load(name)
    chat = CHAT if family.system else CHAT[1:]
    examples = render([{"messages": chat}], tokenizer)
    whole = tokenizer.backend.apply_chat_template(chat, tokenize=False).rstrip()
    assert tokenizer.show(examples.tokens.sequence(0)) == whole
    assert learned_of(examples, tokenizer, 0) == [f"4{family.end}", f"6, I think.{family.end}"]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.keeps_thoughts])
def test_a_template_that_takes_thoughts_out_is_refused_or_gives_a_sequence_for_each_view(load, name):
    family, tokenizer = FAMILIES[name], load(name)
    rows = [{"messages": CHAT[:3]}, {"messages": THOUGHTFUL}]
    with pytest.raises(DataError) as raised:
        render(rows, tokenizer)
    assert "row 1" in str(raised.value)
    assert 'rollout.history = "segment"' in str(raised.value)
    examples = render(rows, tokenizer, history="segment")
    assert examples.row_offsets.tolist() == [0, 1, 3]
    first, second = (learned_of(examples, tokenizer, sequence) for sequence in (1, 2))
    assert first == [f"{THOUGHTFUL[1]['content']}{family.end}"]
    assert second == [f"{THOUGHTFUL[3]['content']}{family.end}"]
    read = tokenizer.show(examples.tokens.sequence(2)).removesuffix(second[0])
    assert read == tokenizer.render_chat(THOUGHTFUL[:3])
    assert "two and two" not in read
    batch = example_batch(examples, examples.rows)
    assert batch.group_ids.tolist() == [0, 1, 1]


def test_a_template_without_an_end_of_turn_gets_the_end_of_sequence(tokenizer):
    examples = render([{"messages": CHAT[1:]}], tokenizer)
    shown = "user: 2+2?\nassistant: 4<|end|>\nuser: And 3+3?\nassistant: 6, I think.<|end|>"
    assert tokenizer.show(examples.tokens.sequence(0)) == shown
    assert learned_of(examples, tokenizer, 0) == ["4<|end|>", "6, I think.<|end|>"]


def test_calls_of_tools_are_learned_and_their_results_are_not(load):
    tokenizer = load("qwen2.5")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    chat = [
        CHAT[1],
        {"role": "assistant", "content": said},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    examples = render([{"messages": chat, "tools": tools}], tokenizer)
    assert learned_of(examples, tokenizer, 0) == [f"{said}<|im_end|>", "It is 4.<|im_end|>"]
    assert '"name": "add"' in tokenizer.show(examples.tokens.sequence(0)).split("<|im_end|>")[0]
    unseen = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(DataError, match="tool_calls"):
        render([{"messages": unseen}], tokenizer)


@pytest.fixture(scope="module", params=CALLING_FORMS)
def calling(request, tmp_path_factory):
    """The tokenizer of a template that shows calls and thoughts."""
    directory = tmp_path_factory.mktemp("calling")
    make_tokenizer(directory)
    set_chat_template(directory, CALLING_FORMS[request.param], "<|im_end|>")
    return load_tokenizer(ModelConfig(path=str(directory)))


def call(arguments):
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def tool(**properties):
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


CALLS = [
    {"messages": [CHAT[1], call({"a": 1}), {"role": "tool", "content": "1"}, CHAT[2]], "tools": [tool(a={"type": "number"})]},
    {"messages": [CHAT[1], call({"b": {"c": [2]}, "d": "x"})], "tools": [tool(b={"type": "object"}, d={"type": "string"})]},
    {"messages": [CHAT[1], call({})], "tools": [tool()]},
]


@pytest.mark.parametrize("source", ["jsonl", "parquet", "texts", "dataset"])
def test_calls_and_tools_are_the_same_tokens_in_every_source_and_form(calling, tmp_path, source):
    rows = CALLS[:2] if source == "dataset" else CALLS
    expected = render(rows, calling).tokens.tokens.tolist()
    learned = [text for number in range(2) for text in learned_of(render(CALLS, calling), calling, number)]
    assert learned[0] == '<tool_call>f{"a": 1}</tool_call><|im_end|>'
    assert learned[2] == '<tool_call>f{"b": {"c": [2]}, "d": "x"}</tool_call><|im_end|>'
    if source == "texts":
        texts = [
            {**row, "tools": json.dumps(row["tools"]), "messages": [row["messages"][0], call(json.dumps(arguments)), *rest]}
            for row in rows
            for arguments, rest in [(row["messages"][1]["tool_calls"][0]["function"]["arguments"], row["messages"][2:])]
        ]
        assert render(texts, calling).tokens.tokens.tolist() == expected
        return
    if source == "dataset":
        datasets = pytest.importorskip("datasets")
        given = given_rows(datasets.Dataset.from_list(rows), DatasetConfig(source="python"), "data.train", may_be_chats=True)
        assert render(given, calling).tokens.tokens.tolist() == expected
        return
    require_source(source)
    path = tmp_path / f"rows.{source}"
    if source == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    read = load_rows(DatasetConfig(source=source, path=str(path)), "train", None, may_be_chats=True)
    assert render(read, calling).tokens.tokens.tolist() == expected


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_shown_under_the_name_that_the_template_reads_or_refused(calling, load, name):
    rows = [{"messages": [CHAT[1], {**CHAT[2], name: "two and two"}]}]
    assert learned_of(render(rows, calling), calling, 0) == ["<think>two and two</think>4<|im_end|>"]
    with pytest.raises(DataError, match=f"row 0 .*{name}, a thought"):
        render(rows, load("chatml"))


def test_a_thought_that_the_template_leaves_out_of_an_answer_is_refused(calling, tmp_path):
    make_tokenizer(tmp_path)
    template = CALLING_FORMS["objects"].replace(
        "if message.reasoning_content", "if message.reasoning_content and message.tool_calls"
    )
    set_chat_template(tmp_path, template, "<|im_end|>")
    with pytest.raises(DataError, match="the thought of message 1"):
        render([{"messages": [CHAT[1], {**CHAT[2], "thinking": "two"}]}], load_tokenizer(ModelConfig(path=str(tmp_path))))


@pytest.mark.parametrize("off", [{"weight": 0}, {"loss": False}, {"train": False}, {"training": 0.0}])
@pytest.mark.parametrize("history", ["refuse", "segment"])
def test_answers_that_are_left_out_are_read_and_not_learned(load, off, history):
    tokenizer = load("chatml")
    chat = [*CHAT[:2], {**CHAT[2], **off}, *CHAT[3:4], {**CHAT[4], "weight": 1}]
    examples, whole = render([{"messages": chat}], tokenizer, history=history), render([{"messages": CHAT}], tokenizer)
    assert examples.tokens.tokens.tolist() == whole.tokens.tokens.tolist()
    assert learned_of(examples, tokenizer, 0) == ["6, I think.<|im_end|>"]
    with pytest.raises(DataError, match="row 0 .*weight, loss"):
        render([{"messages": [CHAT[1], {**CHAT[2], **off}]}], tokenizer)


def test_of_a_rewriting_template_the_sequences_without_an_answer_to_learn_are_left_out(load):
    name = next(name for name, family in FAMILIES.items() if not family.keeps_thoughts)
    chat = [THOUGHTFUL[0], {**THOUGHTFUL[1], "weight": 0}, *THOUGHTFUL[2:]]
    assert render([{"messages": chat}], load(name), history="segment").tokens.num_sequences == 1


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [("tool_call", "calm", "tool_calls"), ("mood", "calm", "Take it out"), ("learn", False, "Take it out")],
)
def test_a_field_that_only_the_template_may_know_is_refused_where_it_shows_none(calling, tmp_path, name, value, near):
    rows = [{"messages": [{**CHAT[1], name: value}, CHAT[2]]}]
    with pytest.raises(DataError, match=f"row 0 .*'{name}'.*{near}"):
        render(rows, calling)
    make_tokenizer(tmp_path)
    template = "{% for m in messages %}{{ m.content }}{{ m.mood }}<|im_end|>{% endfor %}"
    set_chat_template(tmp_path, template, "<|im_end|>")
    shown = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert "calm" in shown.show(render([{"messages": [{**CHAT[1], "mood": "calm"}, CHAT[2]]}], shown).tokens.sequence(0))


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"messages": [CHAT[1], call("{x")]}, "call 0 has arguments that are no JSON"),
        ({"messages": [CHAT[1], CHAT[2]], "tools": ["x"]}, "tool 0"),
        ({"messages": []}, "found list [] as 'messages'"),
        ({"text": "2+2=4"}, "no field 'messages'"),
        ({"messages": [CHAT[0], CHAT[1]]}, "none of its 2 messages is the assistant's"),
        ({"messages": [CHAT[2]]}, "its first message is the assistant's"),
        ({"messages": [CHAT[1], "4"]}, "message 1 that is str '4'"),
        ({"messages": [{"role": "user", "content": 4}, CHAT[2]]}, "message 0 whose 'content' is int"),
        ({"messages": [{"role": "user"}, CHAT[2]]}, "message 0 whose 'content' is NoneType"),
        ({"messages": [CHAT[1], {"role": "assistant", "content": " "}]}, "message 1, the assistant's, is empty"),
    ],
)
def test_rows_that_are_no_chats_are_told_at_once(load, row, fault):
    tokenizer = load("chatml")
    with pytest.raises(DataError) as raised:
        render([{"messages": CHAT}, row, {"messages": 4}], tokenizer)
    message = str(raised.value)
    assert "2 of 3 rows" in message
    assert fault in message
    assert "row 2" in message


def test_what_stands_behind_the_last_answer_is_left_out(load):
    tokenizer = load("chatml")
    longer, shorter = (render([{"messages": chat}], tokenizer).tokens.tokens.tolist() for chat in (CHAT[:4], CHAT[:3]))
    assert longer == shorter


@pytest.mark.parametrize("on_long", ["error", "drop"])
def test_long_chats_are_an_error_or_left_out(load, on_long):
    tokenizer = load("chatml")
    rows = [{"messages": CHAT}, {"messages": CHAT[:3]}]
    limit = render(rows[1:], tokenizer).tokens.lengths[0]
    if on_long == "error":
        with pytest.raises(DataError, match="rollout.max_response_tokens"):
            render(rows, tokenizer, max_tokens=limit)
    else:
        examples = render(rows, tokenizer, max_tokens=limit, on_long_prompt="drop")
        assert (examples.rows.tolist(), examples.num_dropped) == ([1], 1)


def test_files_of_chats_need_no_prompts(load, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"conversation": CHAT}) + "\n")
    config = DatasetConfig(source="jsonl", path=str(path), messages_field="conversation")
    rows = load_rows(config, "train", None, may_be_chats=True)
    assert are_chats(rows, config)
    assert render(rows, load("chatml"), messages_field="conversation").tokens.num_sequences == 1
    with pytest.raises(DataError, match="lacks the field 'prompt'"):
        load_rows(config, "train", None)
    assert not are_chats([{"prompt": "2+2=", "completion": "4", "conversation": CHAT}], config)


def test_a_programs_rows_may_be_chats_too(load):
    rows = given_rows([{"messages": CHAT}], DatasetConfig(source="python"), "data.train", may_be_chats=True)
    assert render(rows, load("chatml")).tokens.num_sequences == 1
    (row,) = given_rows([{"messages": CHAT}], DatasetConfig(source="python"), "data.train")
    assert (row["prompt"], row["answer"]) == (CHAT[:-1], CHAT[-1]["content"])
    with pytest.raises(DataError, match="lacks the field 'prompt'"):
        given_rows([{"messages": CHAT}], DatasetConfig(source="python", format="rlcore"), "data.train")


def test_what_a_template_puts_behind_a_finished_conversation_is_no_part_of_the_next_turn(tmp_path):
    """As Phi's templates end one with the end of the text, behind the end of the turn."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|begin_of_text|>{% endif %}"
    )
    make_tokenizer(tmp_path)
    set_chat_template(tmp_path, template, "<|im_end|>")
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    examples = render([{"messages": CHAT}], tokenizer)
    assert learned_of(examples, tokenizer, 0) == ["4<|im_end|>", "6, I think.<|im_end|>"]
    assert "<|begin_of_text|>" not in tokenizer.show(examples.tokens.sequence(0))
