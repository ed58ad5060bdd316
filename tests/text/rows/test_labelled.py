"""Labelled completions as tokens: each row's own answer, then the answer of the row before, and rows without a label."""

import numpy as np
import pytest

from rlcore.config.data import DatasetConfig
from rlcore.config.model import ModelConfig
from rlcore.run.data import mixes
from rlcore.run.data.examples import example_batch, joined_examples
from rlcore.spi import DataError
from rlcore_text.rows.labelled import render_labelled
from rlcore_text.tokenizers.tokenizer import load_tokenizer

ROWS = [
    {"prompt": "1+1=", "completion": "2", "label": True},
    {"prompt": "2+2=", "completion": "5", "label": False},
    {"prompt": "10+4=", "completion": "14", "label": "True "},
]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_directory):
    return load_tokenizer(ModelConfig(path=str(tokenizer_directory)))


def render(rows, tokenizer, config=None, prompt_limit=100):
    return render_labelled(
        rows, tokenizer, config or DatasetConfig(), key="data.train", max_prompt_tokens=prompt_limit, max_response_tokens=100
    )


def sides(examples, tokenizer):
    found = []
    for start, end in zip(examples.tokens.offsets[:-1], examples.tokens.offsets[1:], strict=True):
        tokens, learned = examples.tokens.tokens[start:end], examples.learned[start:end]
        assert tokens[-1] == tokenizer.eos_token_id
        found.append((tokenizer.decode(tokens[~learned]), tokenizer.decode(tokens[learned][:-1])))
    return found


def test_each_prompt_has_its_own_answer_and_that_of_the_row_before(tokenizer, monkeypatch):
    monkeypatch.setattr(mixes, "CHUNK_ROWS", 2)
    examples = render(ROWS, tokenizer)
    assert sides(examples, tokenizer) == [
        ("1+1=", "2"),
        ("1+1=", "14"),
        ("2+2=", "5"),
        ("2+2=", "2"),
        ("10+4=", "14"),
        ("10+4=", "5"),
    ]
    batch = example_batch(examples, np.array([2, 1]))
    assert batch.rewards.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert batch.group_ids.tolist() == [0, 0, 1, 1]


def test_rows_that_are_left_out_take_part_in_no_pair(tokenizer):
    config = DatasetConfig(on_long_prompt="drop")
    rows = [*ROWS, {"prompt": "1000+1000=", "completion": "7", "label": True}]
    examples = render(rows, tokenizer, config, prompt_limit=6)
    assert examples.rows.tolist() == [0, 1, 2]
    assert sides(examples, tokenizer)[1][1] == "14"


def test_several_sets_keep_their_labels(tokenizer):
    joined = joined_examples([render(ROWS, tokenizer), render(ROWS[:2], tokenizer)], [0, 3])
    assert joined.rewards.tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 0, 0]


def test_all_rows_without_a_label_are_named(tokenizer):
    rows = [*ROWS, {"prompt": "1=", "completion": "1"}, {"prompt": "1=", "completion": "1", "label": 1}]
    with pytest.raises(DataError) as raised:
        render(rows, tokenizer)
    message = str(raised.value)
    assert "2 of 5 rows" in message
    assert "no field 'label'" in message
    assert "1 as 'label'" in message
    named = [{**row, "good": row["label"]} for row in ROWS]
    assert len(render(named, tokenizer, DatasetConfig(label_field="good")).rows) == 3


def test_one_row_alone_is_refused(tokenizer):
    with pytest.raises(DataError, match="one row"):
        render(ROWS[:1], tokenizer)
