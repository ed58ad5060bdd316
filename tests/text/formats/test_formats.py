"""Row formats of other libraries: what is trained on equals transformers' rendering of the same conversation."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_support import require_source
from installer import Installer

from rlcore.config.data import DatasetConfig
from rlcore.config.model import ModelConfig
from rlcore.config.recipe import RolloutConfig
from rlcore.spi import ConfigError, ContractError, DataError
from rlcore_text.rows.datasets import load_rows
from rlcore_text.rows.given_rows import given_rows
from rlcore_text.rows.learned import render_examples
from rlcore_text.rows.prompts import render_prompts
from rlcore_text.tokenizers.tokenizer import PretrainedTokenizer, load_tokenizer
from rlcore_torchkit.testing.models import make_tokenizer

from ..chats.chat_templates import set_chat_template  # type: ignore[import-not-found]

DATA = Path(__file__).parent / "data"
USES: dict[str, dict[str, Any]] = {
    "demonstrations": {"may_be_chats": True},
    "preferences": {"has_prompts": False},
    "rollouts": {},
}
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}{{ '<call>' + call.function | tojson }}{% endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""A template that marks what an answer is."""


def say(*said: str) -> list[dict[str, Any]]:
    """Messages of one letter for the role, and their text."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[one[0]], "content": one[2:]} for one in said]


WEATHER = json.loads((DATA / "trl_preferences.jsonl").read_text().splitlines()[0])["tools"]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
}
ASKED = [*say("u:Weather in Oslo?"), CALL, *say("t:4", "a:4 degrees.")]
HELLO = say("u:Hello", "a:Hi.")
Case = tuple[str, str, list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]]
DEMONSTRATIONS: list[Case] = [
    ("verl.jsonl", "verl", [(say("u:2+3?", "a:It is 5."), []), (say("u:4+4?", "a:It is 8."), [])]),
    ("trl_demonstrations.jsonl", "trl", [(ASKED, WEATHER), (HELLO, [])]),
    (
        "sharegpt.json",
        "sharegpt",
        [(say("s:Be brief.") + ASKED, WEATHER), (say("s:Be kind.", "u:Hello", "a:Hi.", "u:Bye", "a:Bye."), [])],
    ),
    ("sharegpt_roles.jsonl", "sharegpt", [(HELLO, []), (say("u:Bye", "a:Bye."), [])]),
    (
        "alpaca.json",
        "alpaca",
        [
            (say("u:Add the numbers.\n2 and 3", "a:5"), []),
            (say("s:Be brief.", "u:Say bye.", "a:Bye.", "u:Say hello.", "a:Hello."), []),
        ],
    ),
    ("hh_rlhf.jsonl", "hh-rlhf", [(say("u:Hello", "a:Hi.", "u:How are you?", "a:Fine,\n\nand you?"), [])]),
    (
        "openai.jsonl",
        "openai",
        [(say("s:Be brief.", "u:Hello", "a:Hm.", "u:Hello?", "a:Hi."), []), (ASKED, WEATHER)],
    ),
    ("nemo_rl.jsonl", "nemo-rl", [(say("u:What is 2+3?", "a:5"), []), (say("u:What is 4+4?", "a:8"), [])]),
    ("nemo_rl_messages.jsonl", "nemo-rl", [(HELLO, [])]),
]
PREFERENCES = [
    ("trl_preferences.jsonl", "trl", ASKED[:1], "4 degrees.", "Who knows?"),
    ("sharegpt_preferences.jsonl", "sharegpt", HELLO[:1], "Hi.", "Go."),
    ("alpaca_preferences.jsonl", "alpaca", say("u:Say hello."), "Hello.", "No."),
    ("hh_rlhf.jsonl", "hh-rlhf", say("u:Hello", "a:Hi.", "u:How are you?"), "Fine,\n\nand you?", "Go away."),
    ("openai_preferences.jsonl", "openai", HELLO[:1], "Hi.", "Go."),
    ("nemo_rl_preferences.jsonl", "nemo-rl", HELLO[:1], "Hi.", "Go."),
]
ROLLOUTS = [
    ("verl.jsonl", "verl", say("s:Be brief.", "u:What is 2+3?"), {"answer": "5", "data_source": "own/sums"}),
    ("trl_prompts.jsonl", "trl", say("u:What is 2+3?"), {"solution": "5"}),
    ("sharegpt_roles.jsonl", "sharegpt", say("u:Hello"), {"answer": "Hi."}),
    ("alpaca.json", "alpaca", say("u:Add the numbers.\n2 and 3"), {"answer": "5"}),
    ("hh_rlhf.jsonl", "hh-rlhf", say("u:Hello", "a:Hi.", "u:How are you?"), {"answer": "Fine,\n\nand you?"}),
    ("openai_graded.jsonl", "openai", say("u:What is 2+3?"), {"reference": "5"}),
    ("nemo_rl.jsonl", "nemo-rl", say("u:What is 2+3?"), {"answer": "5"}),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTokenizer:
    directory = tmp_path_factory.mktemp("marked")
    make_tokenizer(directory)
    set_chat_template(directory, TEMPLATE, "<|im_end|>")
    return load_tokenizer(ModelConfig(path=str(directory)))


def load(name: str, use: str, folder: Path, form: str = "auto", told: dict[str, str] | None = None) -> Any:
    """Load a file of DATA; verl's as the Parquet file that verl reads."""
    path, source = DATA / name, Path(name).suffix[1:]
    if name == "verl.jsonl":
        source, path = "parquet", folder / "verl.parquet"
        pq.write_table(pa.Table.from_pylist(list(map(json.loads, (DATA / name).read_text().splitlines()))), path)
    require_source(source)
    config = DatasetConfig(source=source, path=str(path), format=form)
    return load_rows(config, "train", None, told={} if told is None else told, **USES[use])


def render(rows: Any, use: Any, tokenizer: PretrainedTokenizer) -> Any:
    rollout = RolloutConfig(max_prompt_tokens=10_000, max_response_tokens=10_000)
    return render_examples(rows, tokenizer, DatasetConfig(), rollout, key="data.train", source=use)


@pytest.mark.parametrize("is_named", [False, True], ids=["auto", "named"])
@pytest.mark.parametrize(("name", "form", "chats"), DEMONSTRATIONS, ids=[one[0] for one in DEMONSTRATIONS])
def test_demonstrations_are_the_templates_tokens_and_its_own_mask_of_answers(
    tokenizer: PretrainedTokenizer, tmp_path: Path, name: str, form: str, chats: Any, is_named: bool
) -> None:
    rows = load(name, "demonstrations", tmp_path, form if is_named else "auto")
    examples = render(rows, "demonstrations", tokenizer)
    assert form in rows.format.split(", ")
    assert examples.tokens.num_sequences == len(chats)
    for number, (chat, tools) in enumerate(chats):
        start, end = examples.tokens.offsets[number : number + 2]
        expected = tokenizer.backend.apply_chat_template(
            chat, tools=tools or None, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = [bool(one) for one in expected["assistant_masks"]][: end - start]
        if name == "openai.jsonl" and number == 0:  # the first answer has the weight 0
            first = mask.index(True)
            mask[first : mask.index(False, first)] = [False] * (mask.index(False, first) - first)
        assert tokenizer.show(expected["input_ids"][end - start :]).strip() == ""
        assert examples.tokens.tokens[start:end].tolist() == expected["input_ids"][: end - start]
        assert examples.learned[start:end].tolist() == mask


@pytest.mark.parametrize(("name", "form", "prompt", "chosen", "rejected"), PREFERENCES, ids=[one[0] for one in PREFERENCES])
def test_preferences_are_the_templates_tokens(
    tokenizer: PretrainedTokenizer, tmp_path: Path, name: str, form: str, prompt: Any, chosen: str, rejected: str
) -> None:
    rows = load(name, "preferences", tmp_path)
    examples = render(rows, "preferences", tokenizer)
    assert rows.format == form
    tools = WEATHER if name == "trl_preferences.jsonl" else None
    begun = len(tokenizer.backend.apply_chat_template(prompt, tools=tools, add_generation_prompt=True)["input_ids"])
    for number, answer in enumerate((chosen, rejected)):
        chat = [*prompt, {"role": "assistant", "content": answer}]
        expected = tokenizer.backend.apply_chat_template(chat, tools=tools)["input_ids"]
        start, end = examples.tokens.offsets[number : number + 2]
        assert examples.tokens.tokens[start:end].tolist() == expected[: end - start]
        assert examples.learned[start:end].tolist() == [place >= begun for place in range(end - start)]


@pytest.mark.parametrize(("name", "form", "prompt", "fields"), ROLLOUTS, ids=[one[0] for one in ROLLOUTS])
def test_prompts_of_rewards_are_the_templates_tokens_and_answers_stay_in_the_row(
    tokenizer: PretrainedTokenizer, tmp_path: Path, name: str, form: str, prompt: Any, fields: Any
) -> None:
    rows = load(name, "rollouts", tmp_path)
    shown = render_prompts(rows, tokenizer, DatasetConfig(), key="data.train", max_prompt_tokens=10_000)
    expected = tokenizer.backend.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    assert form in rows.format.split(", ")
    assert shown.tokens.sequence(0).tolist() == expected
    assert {key: rows[0][key] for key in fields} == fields


def test_the_page_lists_every_format() -> None:
    section = (Path(__file__).parents[3] / "docs" / "data.md").read_text().partition("## Formats")[2].partition("\n## ")[0]
    listed = re.findall(r'^\| `"([\w-]+)"` \|', section, re.MULTILINE)
    assert listed == sorted({form for _, form, *_ in (*DEMONSTRATIONS, *PREFERENCES, *ROLLOUTS)})


MIXED = {"instruction": "Say hello.", "output": "Hi.", "conversations": [{"from": "human", "value": "Hello"}]}


def given(row: dict[str, Any], form: str = "auto", told: dict[str, str] | None = None, **options: Any) -> Any:
    config = DatasetConfig(source="python", format=form, **options)
    return given_rows([row], config, "data.train", told={} if told is None else told, may_be_chats=True)


def test_a_row_of_two_formats_is_refused_with_both_names_and_a_name_decides() -> None:
    with pytest.raises(DataError) as raised:
        given(MIXED)
    assert all(text in str(raised.value) for text in ("'alpaca' and 'sharegpt'", "data.train.format", "row 0"))
    assert given(MIXED, "alpaca")[0]["messages"] == say("u:Say hello.", "a:Hi.")


def test_formats_that_read_a_row_alike_are_no_contradiction() -> None:
    assert given({"messages": HELLO}).format == "nemo-rl, openai, trl, verl"


def test_unknown_fields_are_told_once(tmp_path: Path) -> None:
    told: dict[str, str] = {}
    assert len(list(load("sharegpt.json", "demonstrations", tmp_path, told=told))) == 2
    assert list(told) == ["id"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"form": "alpacca"}, ("alpacca", "Did you mean", "sharegpt")),
        ({"form": "alpaca", "prompt_field": "instruction"}, ("prompt_field", "rlcore")),
    ],
)
def test_a_format_that_cannot_be_is_refused(options: dict[str, str], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        given(MIXED, **options)
    assert "data.train.format" in str(raised.value)
    assert all(part in str(raised.value) for part in parts)


def test_an_environments_own_rows_have_no_format() -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.format"):
        load_rows(DatasetConfig(format="alpaca"), "train", None)


@pytest.mark.parametrize(
    ("row", "form", "use", "part"),
    [
        ({"prompt": "p", "completion": "c"}, "alpaca", "demonstrations", "'prompt', 'completion'"),
        ({"instruction": "a", "output": "b", "history": ["a"]}, "alpaca", "demonstrations", "'history'"),
        ({"instruction": "a", "output": "b", "input": 3}, "alpaca", "demonstrations", "'input'"),
        ({"chosen": "\n\nHuman: a\n\nHuman: b", "rejected": "\n\nHuman: c"}, "hh-rlhf", "preferences", "one speaker"),
        ({"context": HELLO, "completions": [{"rank": 0, "completion": HELLO}]}, "nemo-rl", "preferences", "'completions'"),
    ],
)
def test_a_faulty_row_is_named_with_its_fault(row: Any, form: str, use: str, part: str) -> None:
    config = DatasetConfig(source="python", format=form)
    with pytest.raises(DataError) as raised:
        given_rows([row], config, "data.train", **USES[use])
    assert "data.train: row 0" in str(raised.value)
    assert part in str(raised.value)


def test_a_package_adds_a_format(installer: Installer) -> None:
    source = "def convert(row, use):\n    return {'prompt': row['q'], 'completion': row['a']} if 'q' in row else None\n"
    wrong = "def convert(row, use):\n    return 3 if 'wrong' in row else None\n"
    points = {"rlcore.row_formats": {"acme": "acme_rows:convert", "acme_wrong": "acme_wrong:convert"}}
    installer.add("acme", points, acme_rows=source, acme_wrong=wrong)
    rows = given({"q": "1+1=", "a": "2"})
    assert (rows.format, dict(rows[0])) == ("acme", {"prompt": "1+1=", "completion": "2"})
    with pytest.raises(ContractError, match="acme"):
        given({"wrong": 1})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"}\n', 'source = "jsonl"'),
        ('{"prompt": "a"}', "dict"),
        ('[{"prompt": "a"}, 3]', "item 1"),
        ('[{"prompt": NaN}]', "NaN"),
        ('[{"prompt": "a\\u0000"}]', "NUL"),
        ('[{"prompt": "\\ud800"}]', "surrogate"),
        ('[{"prompt": "a"}, {"other": "b"}]', "item 1"),
    ],
)
def test_a_json_file_that_is_no_list_of_rows_is_refused(tmp_path: Path, text: str, part: str) -> None:
    require_source("json")
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(DataError) as raised:
        load_rows(DatasetConfig(source="json", path=str(tmp_path / "rows.json")), "train", None)
    assert part in str(raised.value)


def test_lines_are_expected_where_a_file_is_one_list_and_the_error_names_the_source() -> None:
    with pytest.raises(DataError, match=r'data\.train\.source = "json"'):
        load_rows(DatasetConfig(source="jsonl", path=str(DATA / "alpaca.json")), "train", None)
