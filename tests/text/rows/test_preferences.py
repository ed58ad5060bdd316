"""Preferences as tokens: which part is the prompt, where an answer ends, and which rows are no pairs."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import evolve
from data_support import require_source
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config.data import DatasetConfig
from rlcore.config.model import ModelConfig
from rlcore.run.data import mixes
from rlcore.run.data.examples import example_batch, joined_examples
from rlcore.spi import MARGINS, DataError
from rlcore_text.rows.datasets import load_rows
from rlcore_text.rows.given_rows import given_rows
from rlcore_text.rows.preferences import render_preferences
from rlcore_text.tokenizers.tokenizer import load_tokenizer
from rlcore_torchkit.testing.models import make_tokenizer

from ..chats.chat_templates import CALLING_FORMS, set_chat_template  # type: ignore[import-not-found]

texts = st.text("0123456789+=", min_size=1, max_size=12)
QUESTION = {"role": "user", "content": "1+1="}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def answer(text):
    return {"role": "assistant", "content": text}


def render(rows, tokenizer, config=None, prompt_limit=100, response_limit=100):
    return render_preferences(
        rows,
        tokenizer,
        config or DatasetConfig(),
        key="data.train",
        max_prompt_tokens=prompt_limit,
        max_response_tokens=response_limit,
    )


def sides(examples, tokenizer):
    """Prompt and answer of each sequence as text, special tokens included."""
    found = []
    for number in range(examples.tokens.num_sequences):
        tokens = examples.tokens.sequence(number)
        start, end = examples.tokens.offsets[number : number + 2]
        length = int(examples.learned[start:end].argmax())
        found.append((tokenizer.show(tokens[:length]), tokenizer.show(tokens[length:])))
    return found


@pytest.fixture(scope="module")
def chatml(tokenizer_directory):
    return load_tokenizer(ModelConfig(path=str(tokenizer_directory), chat_template=CHATML))


@given(data=st.lists(st.tuples(texts, texts, texts).filter(lambda row: row[1] != row[2]), min_size=1, max_size=8))
def test_texts_are_the_prompt_with_each_answer_and_its_end(tokenizer, data):
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in data]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixes, "CHUNK_ROWS", 3)
        examples = render(rows, tokenizer)
    expected = [(prompt, f"{side}<|end|>") for prompt, *both in data for side in both]
    assert sides(examples, tokenizer) == expected
    assert examples.rows.tolist() == list(range(len(data)))
    assert examples.rewards.tolist() == [1.0, 0.0] * len(data)
    assert examples.num_dropped == 0


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [QUESTION, answer("2")], "rejected": [QUESTION, answer("3")]},
        {"prompt": "1+1=", "chosen": [QUESTION, answer("2")], "rejected": [QUESTION, answer("3")]},
        {"prompt": [QUESTION], "chosen": [answer("2")], "rejected": [answer("3")]},
        {"prompt": [QUESTION], "chosen": [QUESTION, answer("2")], "rejected": [QUESTION, answer("3")]},
        {"prompt": [QUESTION], "chosen": "2", "rejected": "3"},
        {"prompt": [QUESTION], "chosen": answer("2"), "rejected": {"from": "gpt", "value": "3"}},
    ],
    ids=["implicit", "named", "explicit", "both", "text", "a message each"],
)
def test_all_forms_of_a_chat_are_the_same_tokens(chatml, row):
    prompt = "<|im_start|>user\n1+1=<|end|>\n<|im_start|>assistant\n"
    assert sides(render([row], chatml), chatml) == [(prompt, "2<|end|>"), (prompt, "3<|end|>")]


def test_a_template_that_ends_no_answer_leaves_that_to_the_end_token(tokenizer):
    row = {"chosen": [QUESTION, answer("2 ")], "rejected": [QUESTION, answer("3")]}
    prompt = "user: 1+1=\nassistant: "
    assert sides(render([row], tokenizer), tokenizer) == [(prompt, "2<|end|>"), (prompt, "3<|end|>")]


def test_what_ends_the_conversation_behind_the_end_of_an_answer_is_left_out(tokenizer_directory):
    template = CHATML.replace("{% endif %}", "{% else %}<|end|>{% endif %}")
    tokenizer = load_tokenizer(ModelConfig(path=str(tokenizer_directory), chat_template=template))
    row = {"chosen": [QUESTION, answer("a<|end|>b")], "rejected": [QUESTION, answer("3")]}
    assert [text for _, text in sides(render([row], tokenizer), tokenizer)] == ["a<|end|>b<|end|>", "3<|end|>"]


def test_an_earlier_answer_belongs_to_the_prompt(chatml):
    begun = [QUESTION, answer("2"), {"role": "user", "content": "+1="}]
    row = {"chosen": [*begun, answer("3")], "rejected": [*begun, answer("4")]}
    (prompt, chosen), _ = sides(render([row], chatml), chatml)
    assert prompt.count("<|end|>") == 3
    assert chosen == "3<|end|>"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def call(arguments):
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    directory = tmp_path_factory.mktemp("calling")
    make_tokenizer(directory)
    set_chat_template(directory, CALLING_FORMS["objects"], "<|im_end|>")
    return load_tokenizer(ModelConfig(path=str(directory)))


@pytest.mark.parametrize(
    ("row", "learned"),
    [
        ({"prompt": [QUESTION], "chosen": [answer("2")], "rejected": [answer("3")]}, ("2", "3")),
        ({"prompt": [QUESTION], "chosen": "2", "rejected": "3"}, ("2", "3")),
        (
            {"prompt": [QUESTION], "chosen": [call({"a": 1})], "rejected": [call('{"a": 2}')]},
            ('<tool_call>f{"a": 1}</tool_call>', '<tool_call>f{"a": 2}</tool_call>'),
        ),
        (
            {"chosen": [QUESTION, call({}), {"role": "tool", "content": "1"}, answer("2")]}
            | {"rejected": [QUESTION, call("{}"), {"role": "tool", "content": "1"}, call({"b": None})]},
            ("2", '<tool_call>f{"b": null}</tool_call>'),
        ),
        (
            {"prompt": [QUESTION], "chosen": [answer("2") | {"reasoning": "r"}], "rejected": [answer("2")]},
            ("<think>r</think>2", "2"),
        ),
        ({"messages": [QUESTION, answer("2")], "rejected_response": "3"}, ("2", "3")),
    ],
)
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), None])
def test_tools_calls_and_thoughts_are_shown_and_learned(calling, row, learned, tools):
    rows = given_rows([{**row, "tools": tools}], DatasetConfig(source="python"), "data.train", has_prompts=False)
    found = sides(render(rows, calling, prompt_limit=999, response_limit=999), calling)
    assert [text for _, text in found] == [f"{text}<|im_end|>" for text in learned]
    assert all(prompt.startswith(f"TOOLS:{json.dumps(TOOL)}") is bool(tools) for prompt, _ in found)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": [TOOL]}, "tools beside a prompt of plain text"),
        ({"prompt": [QUESTION], "chosen": [answer("2")], "rejected": [call("{x")]}, "arguments that are no JSON"),
        ({"prompt": [QUESTION], "chosen": [answer(None)], "rejected": [answer("2")]}, "'content' is NoneType"),
        ({"prompt": [QUESTION], "chosen": [answer("2")], "rejected": [answer("3") | {"weight": 0}]}, "left out by weight"),
        ({"prompt": [QUESTION], "chosen": [answer("2")], "rejected": [answer("3") | {"mood": "calm"}]}, "'mood'"),
        ({"prompt": [QUESTION], "chosen": [answer("2") | {"prefix": True}], "rejected": [answer("3")]}, "'prefix'"),
        (
            {"prompt": [QUESTION, answer("<think>")], "chosen": [answer("2")], "rejected": [answer("3")]},
            "a prompt that ends with",
        ),
    ],
)
def test_answers_that_cannot_be_compared_are_named(calling, row, fault):
    with pytest.raises(DataError, match=f"row 0 .*{fault}"):
        render([row], calling)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_files_need_no_prompts_and_name_their_fields_freely(tmp_path, chatml, source):
    require_source(source)
    row = {"chosen": [QUESTION, answer("3")], "good": [QUESTION, answer("2")]}
    path = tmp_path / f"rows.{source}"
    if source == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    config = DatasetConfig(source=source, path=str(path), chosen_field="good", rejected_field="chosen")
    rows = load_rows(config, "train", None, has_prompts=False)
    assert [text for _, text in sides(render(rows, chatml, config), chatml)] == ["2<|end|>", "3<|end|>"]


PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
BAD = [
    ({"prompt": "1", "rejected": "3"}, "found no field 'chosen'"),
    (PAIR | {"rejected": None}, "found null as 'rejected'"),
    (PAIR | {"rejected": "2"}, "both answers are equal"),
    (PAIR | {"chosen": " "}, "the chosen answer is empty"),
    (PAIR | {"rejected": [answer("3")]}, "one answer is text"),
    ({"chosen": "2", "rejected": "3"}, "found no prompt"),
    (PAIR | {"prompt": 3}, "found int 3 as its prompt"),
    (PAIR | {"chosen": 2, "rejected": 3}, "found int 2 as its chosen answer"),
    ({"chosen": [QUESTION], "rejected": [QUESTION, answer("3")]}, "end with one of 'user'"),
    ({"chosen": [QUESTION, answer("3")], "rejected": [QUESTION, answer("3")]}, "both answers are equal"),
    ({"chosen": [answer("2")], "rejected": [answer("3")]}, "no message in common"),
    ({"chosen": [QUESTION, answer("2")], "rejected": [QUESTION, answer("3"), QUESTION, answer("4")]}, "from message 1 on"),
    (PAIR | {"prompt": "9", "chosen": [QUESTION, answer("2")], "rejected": [QUESTION, answer("3")]}, "is the prompt '9'"),
    (PAIR | {"prompt": [{}], "chosen": [answer("2")], "rejected": [answer("3")]}, "'role' is NoneType"),
    ({"chosen": [QUESTION, answer("2")], "rejected": [QUESTION, answer("")]}, "the rejected answer is empty"),
]


@pytest.mark.parametrize(("row", "fault"), BAD)
def test_what_is_wrong_with_a_row_is_said(chatml, row, fault):
    with pytest.raises(DataError) as raised:
        render([PAIR, row], chatml)
    message = str(raised.value)
    assert "data.train: 1 of 2 rows of the environment's rows" in message
    assert "row 1 (the first is 0): " in message
    assert fault in message


def test_all_bad_rows_are_told_at_once_by_line_and_the_rest_is_counted(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [PAIR, *[row for row, _ in BAD]]) + "\n")
    rows = load_rows(DatasetConfig(source="jsonl", path=str(path)), "train", None, has_prompts=False)
    with pytest.raises(DataError) as raised:
        render(rows, tokenizer, DatasetConfig(source="jsonl", path=str(path)))
    lines = str(raised.value).splitlines()
    assert lines[0].startswith(f"data.train: {len(BAD)} of {len(BAD) + 1} rows of {path} ")
    assert [line.split(": ", 1)[1].startswith(fault[:9]) for line, (_, fault) in zip(lines[1:3], BAD, strict=False)] == [
        True
    ] * 2
    assert lines[1].startswith("  row 1 (the first is 0; line 2 of the file): ")
    assert lines[-1] == f"  and {len(BAD) - 8} more"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[think]{% endif %}", "go on from"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out what has the role 'assistant'"),
        ("{{ raise_exception('no') }}", "refuses the messages"),
        ("{% for m in messages %}{{ m.content.replace('-two', '') }};{% endfor %}", "the same tokens"),
    ],
)
def test_a_template_that_cannot_show_the_answers_is_refused(tokenizer_directory, template, fault):
    tokenizer = load_tokenizer(ModelConfig(path=str(tokenizer_directory), chat_template=template))
    row = {"chosen": [QUESTION, answer("twenty")], "rejected": [QUESTION, answer("twenty-two")]}
    with pytest.raises(DataError, match=fault):
        render([row], tokenizer)


def test_long_pairs_are_an_error_or_dropped_as_pairs(tokenizer):
    rows = [PAIR, PAIR | {"rejected": "33333"}, PAIR | {"prompt": "1+1+1+1="}, PAIR | {"chosen": "4"}]
    with pytest.raises(DataError, match="longer answer of 6 tokens"):
        render(rows, tokenizer, prompt_limit=5, response_limit=4)
    kept = render(rows, tokenizer, DatasetConfig(on_long_prompt="drop"), prompt_limit=5, response_limit=4)
    assert kept.rows.tolist() == [0, 3]
    assert kept.num_dropped == 2
    assert [text for _, text in sides(kept, tokenizer)] == ["2<|end|>", "3<|end|>", "4<|end|>", "3<|end|>"]


def test_the_beginning_of_sequence_stands_before_texts_alone(tokenizer):
    beginning = tokenizer.encode("B")[0]
    with_prefix = evolve(tokenizer, prompt_prefix=(beginning,))
    (text, _), *_, (chat, _) = sides(render([PAIR, PAIR | {"prompt": [QUESTION]}], with_prefix), with_prefix)
    assert text == "B1+1="
    assert chat == "user: 1+1=\nassistant: "


def test_margins_stay_with_their_pairs(tokenizer):
    """A row over a limit takes its own along, and a set without margins beside one with them has 0."""
    rows = [PAIR | {"gap": 1}, PAIR | {"chosen": "4444444", "gap": 2}, PAIR | {"chosen": "4", "gap": -0.5}]
    config = DatasetConfig(margin_field="gap", on_long_prompt="drop")
    kept = render(rows, tokenizer, config, response_limit=4)
    assert example_batch(kept, np.array([1, 0])).batch.sequence_columns[MARGINS].tolist() == [-0.5, -0.5, 1.0, 1.0]
    plain = render([PAIR], tokenizer)
    assert MARGINS not in example_batch(plain, np.array([0])).batch.sequence_columns
    joined = joined_examples([plain, kept], [0, 1])
    assert joined.margins.tolist() == [0.0, 1.0, -0.5]


@pytest.mark.parametrize("row", [{}, {"gap": None}, {"gap": "1"}, {"gap": True}, {"gap": float("nan")}])
def test_a_margin_that_is_no_number_is_refused(tokenizer, row):
    with pytest.raises(DataError, match="a finite number"):
        render([PAIR | row], tokenizer, DatasetConfig(margin_field="gap"))
