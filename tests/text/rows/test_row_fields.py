"""Rows of every source: mapped fields, fields of other frameworks, and forms that stand for others."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_support import require_source

from rlcore.config.data import DatasetConfig
from rlcore.spi import DataError, LazyRows
from rlcore_text.chats.conversation import behind_prompt
from rlcore_text.chats.public_fields import FIELDS
from rlcore_text.rows.datasets import load_rows
from rlcore_text.rows.given_rows import given_rows
from rlcore_text.rows.row_fields import RowReader

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
LEARNED, ASKED, COMPARED = {"may_be_chats": True}, {}, {"has_prompts": False}
REFUSED = [(name, one) for one in FIELDS if one.level == "row" and one.decision == "refused" for name in one.names]


class OwnRows:
    """An environment with rows of its own."""

    def __init__(self, rows):
        self._rows = LazyRows(len(rows), rows.__getitem__, lambda number: number)

    def rows(self, split):
        return self._rows


def load(source, rows, folder, form, **config):
    """The rows of a source, all of them read."""
    path = folder / f"rows.{source}"
    if source == "python":
        return list(given_rows(rows, DatasetConfig(source=source, **config), "data.train", **form))
    if source == "environment":
        return list(load_rows(DatasetConfig(**config), "train", OwnRows(rows), **form))
    require_source(source)
    if source == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif source == "csv":
        path.write_text("".join(",".join(line) + "\n" for line in (rows[0].keys(), *(row.values() for row in rows))))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return list(load_rows(DatasetConfig(source=source, path=str(path), **config), "train", None, **form))


def read(row, form, **config):
    reader = RowReader(config=DatasetConfig(**config), key="data.train", **form)
    return reader.read(row, "row 0"), reader.told


@pytest.mark.parametrize("source", ["jsonl", "parquet", "python", "environment"])
@pytest.mark.parametrize("form", [LEARNED, ASKED, COMPARED], ids=["learned", "asked", "compared"])
@pytest.mark.parametrize("name", ["prompt", "completion", "messages", "chosen", "rejected", "margin"])
def test_a_mapped_field_is_there_in_every_row_or_named(tmp_path, source, form, name):
    usual = {"prompt": "p", "completion": "c", "messages": [USER, ANSWER], "chosen": "a", "rejected": "b", "margin": 1}
    if name == "messages":
        del usual["completion"]
    rows = [{**usual, "mine": usual[name]}, usual]
    with pytest.raises(DataError, match=rf"(row 1|line 2).*'mine'.*({name}_field|every row)"):
        load(source, rows, tmp_path, form, **{f"{name}_field": "mine"})
    load(source, rows[:1], tmp_path, form, **{f"{name}_field": "mine"})


@pytest.mark.parametrize("source", ["jsonl", "csv", "parquet", "python"])
def test_a_mapped_field_has_a_value_in_every_row(tmp_path, source):
    rows = [{"prompt": "p", "completion": "c", "mine": value} for value in ("m", "")]
    with pytest.raises(DataError, match=r"(row 1|line 2|line 3).*'mine'"):
        load(source, rows, tmp_path, LEARNED, completion_field="mine")


@pytest.mark.parametrize("source", ["jsonl", "parquet", "python"])
@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"messages_field": "chat"}, "'chat'.*messages_field"),
        ({"format": "rlcore"}, "'prompt'.*messages_field = \"conversations\""),
    ],
)
def test_chats_under_another_name_are_found_in_the_message(tmp_path, source, config, hint):
    with pytest.raises(DataError, match=hint):
        load(source, [{"conversations": [{"from": "human", "value": "q"}]}], tmp_path, LEARNED, **config)


def test_rows_of_an_environment_keep_their_levels_where_their_fields_are_mapped():
    rows = load_rows(DatasetConfig(prompt_field="task"), "train", OwnRows([{"task": "a"}, {"task": "b"}]))
    assert isinstance(rows, LazyRows)
    assert [row["prompt"] for row in rows] == ["a", "b"]
    assert rows.level_of(1) == 1


@pytest.mark.parametrize(
    ("row", "config", "fault"),
    [
        ({"prompt": "p", "completion": "c", "chat": [USER, ANSWER]}, {"messages_field": "chat"}, "'chat' and a completion"),
        ({"ask": "p", "messages": [USER, ANSWER]}, {"prompt_field": "ask"}, "no completion; .*'ask' is learned"),
    ],
)
def test_a_mapped_field_is_not_passed_over_for_the_other_form_of_row(row, config, fault):
    with pytest.raises(DataError, match=fault):
        read(row, LEARNED, **config)
    assert read(row | {"prompt": "p"}, ASKED, **config)[0]["prompt"] == "p"
    assert read({**row, "prompt": "p"}, LEARNED)[1] == {}


@pytest.mark.parametrize(("form", "kept"), [(LEARNED, False), (COMPARED, False), (ASKED, True)])
def test_rows_of_an_environment_are_read_where_they_are_learned(tmp_path, form, kept):
    row = {"prompt": [USER], "completion": "c", "chosen": "a", "rejected": "b", "tools": json.dumps([TOOL])}
    assert (load("environment", [row], tmp_path, form) == [row]) is kept


@pytest.mark.parametrize(("name", "field"), REFUSED, ids=[name for name, _ in REFUSED])
def test_fields_that_would_change_what_is_read_are_refused_or_told(name, field):
    value = name not in ("label", "kto_tag")
    config = {"prompt_field": "instruction"} if name in ("input", "context") else {}
    row = {"prompt": "p", "instruction": "p", "completion": "c", name: value}
    with pytest.raises(DataError, match=f"'{name}', which is not read: "):
        read(row, LEARNED, **config)
    for null in (None, "", [], {}):
        assert read({**row, name: null}, LEARNED, **config)[1] == {}
    if field.for_environment:
        assert list(read(row, ASKED)[1]) == [name]
        assert read(row, ASKED)[0][name] == value
    assert read(row, {"for_agents": True}, **config) == ({**row, "prompt": "p"}, {})


@pytest.mark.parametrize("value", [False, True, "False", "true ", np.bool_(False)])
@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_a_mark_of_good_and_bad_answers_is_refused_in_the_form_of_each_source(name, value):
    with pytest.raises(DataError, match=f"'{name}', which is not read: "):
        read({"prompt": "p", "completion": "c", name: value}, LEARNED)


@pytest.mark.parametrize(
    ("row", "form", "config"),
    [
        ({"prompt": "p", "completion": "c", "label": 1}, LEARNED, {}),
        ({"prompt": "p", "completion": "c", "label": "positive"}, LEARNED, {}),
        ({"prompt": "p", "label": True}, ASKED, {}),
        ({"prompt": "p", "completion": "c", "input": "i"}, LEARNED, {}),
        ({"prompt": "p", "system": "s", "completion": "c"}, LEARNED, {"completion_field": "system"}),
        ({"prompt": "p", "completion": "c", "reward_model": {"a": 1}, "extra_info": {}, "data_source": "x"}, LEARNED, {}),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1}, COMPARED, {"margin_field": "margin"}),
        ({"prompt": "p", "message": "m", "choosen": 1, "tool": None}, ASKED, {}),
        ({"prompt": "p", "completion": "c", "tool": "t"}, LEARNED, {"prompt_field": "tool"}),
    ],
)
def test_fields_of_these_names_that_mean_something_else_are_the_rows_own(row, form, config):
    found, told = read(row, form, **config)
    assert told == {}
    assert {name: found[name] for name in row if name not in ("prompt", "completion")} == {
        name: value for name, value in row.items() if name not in ("prompt", "completion")
    }


@pytest.mark.parametrize(
    ("form", "field", "name"),
    [
        (COMPARED, {"margin": 1}, "margin"),
        (LEARNED, {"system_prompt": "s"}, "system_prompt"),
        (ASKED, {"system_prompt": "s"}, "system_prompt"),
        (ASKED, {"prompt": [{"role": "user", "content": "<image>q"}]}, "prompt"),
        (LEARNED, {"completion": None, "messages": [{"from": "human", "value": "<image>q"}, ANSWER]}, "messages"),
        (ASKED, {"agent_name": "tool_agent"}, "agent_name"),
        *((LEARNED, {name: 0.5}, name) for name in ("weight", "loss_scale", "sample_weight", "loss_mask")),
        (COMPARED, {"channel": "chat"}, "channel"),
        *((LEARNED, {name: "x"}, name) for name in ("teacher_prompt", "privileged_context", "env_class", "loss_multiplier")),
        *((LEARNED, {name: [ANSWER]}, name) for name in ("rejected_messages", "rejected_response", "positive_images")),
        *((form, {"prompt": json.dumps([USER])}, "prompt") for form in (ASKED, LEARNED, COMPARED)),
        *((form, {name: [TOOL]}, name) for form in (LEARNED, ASKED, COMPARED) for name in ("Tools", "tool", "toools")),
        *((form, {"imges": ["a.png"]}, "imges") for form in (LEARNED, ASKED)),
        (LEARNED, {"completion": None, "mesages": [USER, ANSWER]}, "mesages"),
        (COMPARED, {"chosen": None, "choosen": "a"}, "choosen"),
        *((COMPARED, {name: json.dumps([ANSWER])}, name) for name in ("chosen", "rejected")),
        (COMPARED, {"rejected": None, "rejected_response": json.dumps([ANSWER])}, "rejected_response"),
        *((LEARNED, {"completion": text}, "completion") for text in (json.dumps([ANSWER]), str([ANSWER]), json.dumps(ANSWER))),
        (LEARNED, {"assistant_masks": [0, 1]}, "assistant_masks"),
        (LEARNED, {"messages": [USER, ANSWER]}, "messages"),
        *((LEARNED, {name: ["x"]}, name) for name in ("reasoning_content", "thinking", "tool_calls", "function_call")),
        (COMPARED, {"ref_chosen_logps": -1.0}, "ref_chosen_logps"),
        (
            LEARNED,
            {"tools": [{"name": "f", "paramters": {"type": "object"}, "strict": True}]},
            "tools.paramters",
        ),
    ],
)
def test_fields_that_no_one_reads_are_told(form, field, name):
    assert list(read({"prompt": [USER], "completion": "c", "chosen": "a", "rejected": "b", **field}, form)[1]) == [name]


@pytest.mark.parametrize("name", ["input", "context"])
@pytest.mark.parametrize("form", [LEARNED, COMPARED])
def test_a_further_part_of_a_prompt_is_told_where_the_recipe_names_the_first(form, name):
    row = {"question": "p", "completion": "c", "chosen": "a", "rejected": "b", name: "x"}
    assert list(read(row, form, prompt_field="question")[1]) == [name]
    assert read(row, form, prompt_field="question", completion_field=name)[1] == {}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]]])
def test_tools_of_a_row_have_one_form(tools):
    for form in (LEARNED, ASKED, COMPARED):
        assert read({"prompt": [USER], "tools": tools}, form)[0]["tools"] == (TOOL,)
    with pytest.raises(DataError, match="row 0: found tool 0 as"):
        read({"prompt": [USER], "tools": [{"type": "x"}]}, ASKED)
    assert read({"prompt": "p", "tools": ["search"]}, {"for_agents": True})[0]["tools"] == ["search"]


def test_a_prompt_has_one_form_unless_an_agent_gets_it():
    row = {"prompt": [{"from": "human", "value": "q"}]}
    assert read(row, ASKED)[0]["prompt"] == [USER]
    assert read(row, {"for_agents": True})[0] == row


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER], "rejected_response": "b"},
        {"messages": [USER, ANSWER], "rejected_messages": [USER, {"role": "assistant", "content": "b"}]},
    ],
)
def test_a_chat_with_a_rejected_end_is_two_answers(row):
    found, _ = read(row, COMPARED)
    assert found["chosen"] == [USER, ANSWER]
    assert found["rejected"] == [USER, {"role": "assistant", "content": "b"}]


def test_images_of_a_prompt_whose_answer_is_messages_are_filled_in():
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}]
    found, _ = read({"images": ["a.png"], "prompt": shown, "completion": [ANSWER]}, LEARNED)
    assert found["messages"][0]["content"][0]["image"] == "a.png"


def test_a_chosen_answer_says_nothing_where_answers_are_rewarded():
    assert read({"prompt": "p", "chosen_response": "x"}, ASKED)[0]["prompt"] == "p"


CALLED, OTHER = {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("messages", "rejected"),
    [
        ([USER, CALLED, {"role": "tool_response", "content": "10"}, ANSWER], [USER, OTHER]),
        ([USER, CALLED, {"role": "tool", "content": "10"}, ANSWER], [USER, CALLED, {"role": "tool", "content": "10"}, OTHER]),
        ([USER, ANSWER, ANSWER], [USER, OTHER]),
        ([{"from": "human", "value": "q"}, ANSWER], [{"from": "human", "value": "q"}, OTHER]),
    ],
)
@pytest.mark.parametrize("response", ["b", [OTHER]])
def test_a_rejected_response_stands_behind_the_last_query(messages, rejected, response):
    assert read({"messages": messages, "rejected_response": response}, COMPARED)[0]["rejected"] == rejected


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (
            {"messages": [USER, ANSWER], "rejected_response": "z", "rejected_messages": [USER, OTHER]},
            "both 'rejected_response'",
        ),
        ({"prompt": "p", "chosen": "x", "rejected": "y", "rejected_response": "z"}, "both 'rejected' and 'rejected_response'"),
        ({"messages": [USER, ANSWER], "chosen": "x", "rejected_response": "z"}, "both 'chosen' and 'messages'"),
        ({"prompt": "p", "chosen_response": "x", "rejected_response": "z"}, "'chosen_response', which is not read"),
        ({"messages": [USER, ANSWER], "rejected_response": 5}, "int as 'rejected_response'"),
    ],
)
def test_two_columns_of_one_meaning_are_refused(row, fault):
    with pytest.raises(DataError, match=fault):
        read(row, COMPARED)


@pytest.mark.parametrize(
    "cell",
    [
        b"\x89PNG\r\n\x1a\n",
        {"bytes": b"\xff\xd8\xff", "path": None},
        {"bytes": None, "path": "a.JPG"},
        ["data:image/png;base64,iVBO"],
        "data:image/png;base64,iVBO",
    ],
)
def test_images_in_a_column_of_any_name_are_noticed(cell):
    for form, row in ((LEARNED, {"completion": "c"}), (COMPARED, {"chosen": "a", "rejected": "b"})):
        with pytest.raises(DataError, match="images in the column 'photo'"):
            read({"prompt": "p", "photo": cell, **row}, form)
    assert list(read({"prompt": "p", "photo": cell}, ASKED)[1]) == ["photo"]
    for other in ("a.png", b"abc", {"path": "a.png", "size": 3}, [], {}, None, ["data:text/plain,a"]):
        assert read({"prompt": "p", "completion": "c", "photo": other}, LEARNED)[1] == {}


def test_messages_as_completion_are_a_chat_whose_prompt_is_not_learned():
    found, _ = read({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, LEARNED)
    assert "completion" not in found
    assert found["messages"] == [USER, {**ANSWER, "weight": 0}, USER, ANSWER]
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    found, _ = read({"prompt": [turns[0], {**turns[1], "train": True}, turns[0]], "completion": [turns[1]]}, LEARNED)
    assert found["messages"] == [turns[0], {**turns[1], "weight": 0}, *turns]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ([USER], [USER, ANSWER]),
        ([USER], [{"role": "system", "content": "s"}, USER, ANSWER]),
        ([USER], [{"role": "user", "content": "q "}, ANSWER]),
        ([USER, ANSWER], [USER, ANSWER]),
        ([{"role": "system", "content": "s"}], [{"role": "developer", "content": "s"}, USER, ANSWER]),
    ],
)
def test_an_answer_that_begins_with_the_prompt_again_is_refused(prompt, answer):
    with pytest.raises(DataError, match="role '(user|system|developer)'"):
        behind_prompt(prompt, answer)


def test_an_answer_may_go_on_with_a_further_turn():
    system, result = {"role": "system", "content": "s"}, {"role": "tool", "content": "4"}
    for prompt, answer in (([system], [USER, ANSWER]), ([USER, ANSWER], [{"role": "user", "content": "r"}, ANSWER])):
        assert behind_prompt(prompt, answer) == [*prompt, *answer]
    assert behind_prompt([USER, ANSWER], [result, ANSWER]) == [USER, ANSWER, result, ANSWER]


def test_messages_as_completion_do_not_go_on_with_what_the_prompt_has_begun():
    with pytest.raises(DataError, match="rest of the answer"):
        read({"prompt": [USER, ANSWER], "completion": [ANSWER]}, LEARNED)
    assert read({"prompt": [USER, ANSWER], "completion": "b"}, LEARNED)[0]["completion"] == "b"


@pytest.mark.parametrize("source", ["jsonl", "parquet", "python"])
@pytest.mark.parametrize(
    ("call", "tool", "names"),
    [
        ({"a": 1, "b": {"c": None}}, TOOL, ["function.arguments"]),
        ('{"a": null}', TOOL, []),
        ({"a": 1}, {"name": "f", "parameters": {"properties": {"a": None, "b": {"type": "string"}}}}, ["function.parameters"]),
        ({"a": 1}, TOOL, []),
    ],
)
def test_nulls_that_arrow_may_have_filled_in_before_are_told(tmp_path, source, call, tool, names):
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": call}}]}
    told = {}
    load(source, [{"messages": [USER, said], "tools": [tool]}], tmp_path, {**LEARNED, "told": told})
    assert list(told) == ([] if source == "parquet" else names)


def test_a_data_set_of_the_package_has_no_filler_nulls():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "p", "x": {"a": 1}}, {"prompt": "q", "x": {"b": 2}}])
    assert [row["x"] for row in given_rows(rows, DatasetConfig(source="python"), "data.train")] == [{"a": 1}, {"b": 2}]
