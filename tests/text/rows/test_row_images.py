"""Images of rows: beside their file, in columns, in data sets that are learned."""

import base64
import io
import json

import numpy as np
import pyarrow as pa
import pytest
from data_support import require_source
from pyarrow import parquet

from rlcore.config.data import DatasetConfig
from rlcore.config.model import ModelConfig
from rlcore.run.data.examples import example_batch, joined_examples
from rlcore.spi import DataError
from rlcore_text.chats.images import images_of
from rlcore_text.rows.assistant_masked_chats import render_chats
from rlcore_text.rows.datasets import load_rows
from rlcore_text.rows.given_rows import given_rows
from rlcore_text.rows.preferences import render_preferences
from rlcore_text.rows.prompts import render_demonstrations, render_prompts
from rlcore_text.tokenizers.tokenizer import load_tokenizer
from rlcore_torchkit.testing.image_models import make_image_model

pytest.importorskip("transformers.modeling_utils")
Image = pytest.importorskip("PIL.Image")


def png(color):
    buffer = io.BytesIO()
    Image.new("RGB", (16, 8), color).save(buffer, format="PNG")
    return buffer.getvalue()


RED, BLUE = png("red"), png("blue")
USER = {"role": "user", "content": "which?"}
SHOWN = [{"type": "image"}, {"type": "text", "text": "which?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(ModelConfig(path=str(make_image_model(tmp_path_factory.mktemp("images") / "model"))))


def chat(answer, image=None, content=SHOWN):
    shown = [part if part["type"] == "text" or image is None else {"type": "image", "image": image} for part in content]
    return [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]


def jsonl(folder, rows):
    (folder / "images").mkdir()
    (folder / "images" / "red.png").write_bytes(RED)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(source="jsonl", path=str(folder / "rows.jsonl"))


def learned(rows, config, tokenizer):
    return render_chats(rows, tokenizer, config, key="data.train", max_tokens=100, history="refuse")


def load(config):
    return load_rows(config, "train", None, may_be_chats=True)


def test_chats_of_a_file_read_the_images_beside_it(tmp_path, tokenizer):
    config = jsonl(tmp_path, [{"messages": chat("red", "images/red.png")}, {"messages": chat("none", content=SHOWN[1:])}])
    examples = learned(load(config), config, tokenizer)
    batch = example_batch(examples, np.array([1, 0])).batch
    assert batch.images == ((), (RED,))
    first = batch.offsets[1]
    pads = np.flatnonzero(batch.tokens == tokenizer.encode("<|image_pad|>")[0])
    assert len(pads) == 2
    assert pads.min() > first
    assert not batch.loss_mask[pads].any()
    assert tokenizer.decode(batch.tokens[batch.loss_mask]) == "nonered"


def test_the_images_of_a_chat_that_goes_on(tmp_path, tokenizer):
    messages = [*chat("red", "images/red.png"), *chat("again", "images/red.png"), chat("", "images/red.png")[0]]
    config = jsonl(tmp_path, [{"messages": messages}])
    assert learned(load(config), config, tokenizer).images == ((RED, RED),)  # not what comes behind the last answer


def test_a_column_of_parquet(tmp_path, tokenizer):
    images = [[{"bytes": RED, "path": "r.png"}, {"bytes": BLUE, "path": "b.png"}], [{"bytes": BLUE, "path": None}]]
    messages = [chat("two", content=[SHOWN[0], *SHOWN]), chat("one")]
    for _, answer in messages:  # a column has one type
        answer["content"] = [{"type": "text", "text": answer["content"]}]
    parquet.write_table(pa.table({"messages": messages, "images": images}), tmp_path / "rows.parquet")
    require_source("parquet")
    config = DatasetConfig(source="parquet", path=str(tmp_path / "rows.parquet"))
    assert learned(load(config), config, tokenizer).images == ((RED, BLUE), (BLUE,))


def test_rows_of_a_program_and_their_completions(tokenizer):
    rows = [
        {"prompt": chat("")[:1], "image": Image.open(io.BytesIO(RED)), "completion": "red"},
        {"prompt": "a", "completion": "b"},
    ]
    config = DatasetConfig(source="python")
    given = given_rows(rows, config, "data.train")
    options = {"key": "data.train", "max_prompt_tokens": 60}
    examples = render_demonstrations(given, tokenizer, config, max_response_tokens=20, **options)
    assert [len(own) for own in examples.images] == [1, 0]
    joined = joined_examples([examples, examples], [0, 2])
    assert joined.images == examples.images * 2
    assert render_prompts(given, tokenizer, config, **options).tokens.num_sequences == 2


def url(file):
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


@pytest.mark.parametrize(
    ("content", "column", "shown"),
    [
        ("<image>which?", [RED], "#which?"),
        ("a<image> or <image>b", [RED, BLUE], "a# or #b"),
        ("which?", [RED], "#which?"),
        ("which?", RED, "#which?"),
        ([{"type": "text", "text": "a<image>b"}], [RED], "a#b"),
        ([{"type": "text", "text": "which?"}], [RED, BLUE], "##which?"),
        ([{"type": "image_url", "image_url": {"url": url(RED)}}, {"type": "text", "text": "which?"}], None, "#which?"),
        ([{"type": "input_image", "image_url": url(RED)}, {"type": "input_text", "text": "which?"}], None, "#which?"),
        ([{"type": "image", "url": url(RED)}], None, "#"),
        ([{"type": "image"}], [url(RED)], "#"),
        ("<image>which?", [{"image": url(RED), "bytes": None}], "#which?"),
        ("<image>which?", [{"url": url(RED), "max_pixels": None}], "#which?"),
        ("which?", [], "which?"),
        ("which?", "", "which?"),
        ("which?", None, "which?"),
        ("<image>which?", None, "<image>which?"),
    ],
)
@pytest.mark.parametrize("name", ["images", "image"])
def test_images_of_a_column_come_where_the_messages_have_places(content, column, shown, name, tokenizer):
    row = {"prompt": [{"role": "user", "content": content}], "completion": "x"}
    row |= {} if column is None else {name: column}
    chat = {**row, "messages": [*row["prompt"], {"role": "assistant", "content": "x"}]}
    config = DatasetConfig(source="python")
    pads = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
    options = {"key": "data.train", "max_prompt_tokens": 99}
    given = given_rows([row], config, "data.train", may_be_chats=True)
    told = {key: value for key, value in chat.items() if key not in ("prompt", "completion")}
    chats = given_rows([told], config, "data.train", may_be_chats=True)
    for examples in (
        render_demonstrations(given, tokenizer, config, max_response_tokens=20, **options),
        learned(chats, config, tokenizer),
    ):
        assert tokenizer.show(examples.tokens.sequence(0)).startswith(f"user: {shown.replace('#', pads)}<|end|>")
        assert len((examples.images or [()])[0]) == shown.count("#")
    asked = render_prompts(given_rows([row], config, "data.train"), tokenizer, config, **options)
    assert tokenizer.show(asked.tokens.sequence(0)).startswith(f"user: {shown.replace('#', pads)}<|end|>")


@pytest.mark.parametrize(
    ("content", "column"),
    [
        ("<image>which?", [RED, BLUE]),
        ("<image><image>which?", [RED]),
        ("<image>which?", []),
        (SHOWN, [RED, BLUE]),
        (SHOWN, []),
        ([{"type": "image", "image": RED}], [BLUE]),
    ],
)
@pytest.mark.parametrize("form", [{}, {"may_be_chats": True}])
def test_places_and_images_have_to_be_as_many(content, column, form):
    row = {"messages" if form else "prompt": [{"role": "user", "content": content}], "images": column}
    with pytest.raises(DataError, match="row 0 .*places for .*<image>"):
        given_rows([row], DatasetConfig(source="python"), "data.train", **form)


@pytest.mark.parametrize(
    ("row", "form", "fault"),
    [
        ({"prompt": "which?", "images": [RED]}, {}, "beside a prompt of plain text"),
        ({"prompt": "which?", "completion": "a", "image": RED}, {"may_be_chats": True}, "beside a prompt of plain text"),
        ({"prompt": "which?", "chosen": "a", "rejected": "b", "images": [RED]}, {"has_prompts": False}, "a column of images"),
        ({"prompt": [USER], "images": [RED], "image": BLUE}, {}, "images in both 'images' and 'image'"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "url": "http://a/b"}]}]}, {}, "nothing is downloaded"),
    ],
)
def test_images_that_no_one_would_see_are_refused(row, form, fault):
    with pytest.raises(DataError, match=f"row 0 .*{fault}"):
        given_rows([row], DatasetConfig(source="python"), "data.train", **form)
    given_rows([row], DatasetConfig(source="python"), "data.train", for_agents=True)


@pytest.mark.parametrize("text", ["<image>which?", "which?"])
def test_messages_of_sharegpt_have_places_too(text, tokenizer):
    row = {"messages": [{"from": "human", "value": text}, {"from": "gpt", "value": "red"}], "images": [RED]}
    config = DatasetConfig(source="python")
    given = given_rows([row], config, "data.train", may_be_chats=True)
    assert learned(given, config, tokenizer).images == ((RED,),)


def test_parts_of_sharegpt_are_parts_and_their_paths_start_at_the_data_set(tmp_path):
    parts = [{"type": "image"}, {"type": "text", "text": "which?"}]
    row = {"messages": [{"from": "human", "value": parts}, {"from": "gpt", "value": "red"}], "images": ["a.png"]}
    (read,) = given_rows([row], DatasetConfig(source="python"), "k", may_be_chats=True)
    assert read["messages"][0] == {"from": "human", "content": [{"type": "image", "image": "a.png"}, parts[1]]}
    named = {"messages": [{"from": "human", "value": [{"type": "image", "image": "images/red.png"}]}, row["messages"][1]]}
    (read,) = load_rows(jsonl(tmp_path, [named]), "train", None, may_be_chats=True)
    assert read["messages"][0]["content"] == [{"type": "image", "image": str(tmp_path / "images" / "red.png")}]


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([USER, {"role": "assistant", "content": "<image> is red"}], "<image> in an answer, in message 1"),
        ([{"role": "user", "content": "<image>x"}, {"role": "assistant", "content": "<image>"}], "<image> in an answer"),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<image>"}]}],
            "beside places that are parts",
        ),
    ],
)
def test_a_mark_that_gets_no_image_is_refused_beside_a_column(messages, fault):
    config = DatasetConfig(source="python", prompt_field="prompt")
    with pytest.raises(DataError, match=fault):
        given_rows([{"prompt": messages, "images": [RED]}], config, "k")


@pytest.mark.parametrize("prompt", ["<|image_pad|>which?", [{"role": "user", "content": "<|image_pad|>which?"}], "which?"])
def test_the_token_of_images_is_no_text(prompt, tokenizer):
    assert tokenizer.image_token == "<|image_pad|>"
    row = {"prompt": prompt, "completion": "red" if prompt != "which?" else "<|image_pad|>"}
    with pytest.raises(DataError, match="row 0 .*<.image_pad.>"):
        render_demonstrations(
            [row], tokenizer, DatasetConfig(), key="data.train", max_prompt_tokens=100, max_response_tokens=100
        )


@pytest.mark.parametrize("image", ["images/no.png", "rows.jsonl"])
def test_a_file_that_is_missing_or_no_image_is_named_with_its_row(image, tmp_path, tokenizer):
    config = jsonl(tmp_path, [{"prompt": chat("", "images/red.png")[:1]}, {"prompt": chat("", image)[:1]}])
    with pytest.raises(DataError, match=r"row 1[^:]*: .*(no\.png|no image)"):
        render_prompts(load_rows(config, "train", None), tokenizer, config, key="data.train", max_prompt_tokens=60)
    chats = jsonl_chats(tmp_path, image)
    with pytest.raises(DataError, match=r"row 0[^:]*: .*(no\.png|no image)"):
        learned(load(chats), chats, tokenizer)


def jsonl_chats(folder, image):
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat("a", image)}))
    return DatasetConfig(source="jsonl", path=str(folder / "chats.jsonl"))


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (chat("a"), "without a file"),
        (
            [*chat("a", "images/red.png")[:1], {"role": "assistant", "content": [{"type": "image", "image": RED.hex()}]}],
            "assistant",
        ),
    ],
)
def test_messages_whose_images_are_not_there(messages, fault, tmp_path, tokenizer):
    config = jsonl(tmp_path, [{"messages": messages}])
    with pytest.raises(DataError, match=fault):
        learned(load(config), config, tokenizer)


def test_preferences_between_answers_to_images_are_refused(tmp_path, tokenizer):
    config = jsonl(tmp_path, [{"prompt": chat("", "images/red.png")[:1], "chosen": "a", "rejected": "b"}])
    rows = load_rows(config, "train", None, has_prompts=False)
    with pytest.raises(DataError, match="images"):
        render_preferences(rows, tokenizer, config, key="data.train", max_prompt_tokens=60, max_response_tokens=20)


@pytest.mark.parametrize("form", ["verl", "trl"])
def test_image_columns_of_verl_and_trl(form, tmp_path, tokenizer):
    """verl marks the place of an image in the text; TRL's go before the user's text."""
    text = "<image>which?" if form == "verl" else "which?"
    row = {"prompt": [[{"role": "user", "content": text}]], "images": [[{"bytes": RED, "path": None}]]}
    if form == "verl":
        row |= {
            "data_source": ["colors"],
            "reward_model": [{"style": "rule", "ground_truth": "red"}],
            "extra_info": [{"index": 0}],
        }
    parquet.write_table(pa.table(row), tmp_path / "rows.parquet")
    require_source("parquet")
    config = DatasetConfig(source="parquet", path=str(tmp_path / "rows.parquet"), format=form)
    rows = load_rows(config, "train", None)
    shown = render_prompts(rows, tokenizer, config, key="data.train", max_prompt_tokens=60)
    expected = [{"prompt": [{"role": "user", "content": [{"type": "image", "image": RED}, SHOWN[1]]}]}]
    given = given_rows(expected, DatasetConfig(source="python"), "data.train")
    alike = render_prompts(given, tokenizer, DatasetConfig(source="python"), key="data.train", max_prompt_tokens=60)
    assert shown.tokens.tokens.tolist() == alike.tokens.tokens.tolist()
    assert images_of(rows[0]["prompt"]) == (RED,)
    assert rows[0].get("answer") == ("red" if form == "verl" else None)
