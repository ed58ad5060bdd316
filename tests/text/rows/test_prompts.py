"""Prompts and demonstrations as tokens: what is masked, what is too long, what is missing."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config.data import DatasetConfig
from rlcore.run.data import mixes
from rlcore.run.data.examples import example_batch
from rlcore.spi import DataError, FinishReason, ModelError, Observation
from rlcore_text.rows.datasets import load_rows
from rlcore_text.rows.prompts import encode_prompts, render_demonstrations, render_prompts

DROP = DatasetConfig(on_long_prompt="drop")
texts = st.text("0123456789+=", min_size=1, max_size=12)


def rows_of(*texts):
    return [{"prompt": text, "completion": "7"} for text in texts]


def render(rows, tokenizer, config=None, limit=100, **options):
    return render_prompts(rows, tokenizer, config or DatasetConfig(), key="data.train", max_prompt_tokens=limit, **options)


def demonstrate(rows, tokenizer, config=None, prompt_limit=100, response_limit=100):
    return render_demonstrations(
        rows,
        tokenizer,
        config or DatasetConfig(),
        key="data.train",
        max_prompt_tokens=prompt_limit,
        max_response_tokens=response_limit,
    )


def test_text_messages_and_tokens_become_prompts(tokenizer):
    tokens = np.asarray([5, 6], np.int32)
    messages = [{"role": "user", "content": "hi"}]
    encoded = encode_prompts([Observation(text="1+1="), Observation(tokens=tokens), Observation(messages=messages)], tokenizer)
    assert [list(prompt) for prompt in encoded] == [
        tokenizer.encode("1+1="),
        [5, 6],
        tokenizer.encode("user: hi\nassistant: "),
    ]


TOOL = {"type": "function", "function": {"name": "look"}}
BEGUN = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>"}]


def test_what_a_prompt_begins_of_an_answer_is_gone_on_with(tokenizer):
    opened = "user: 2+2?\nassistant: <think>"
    assert tokenizer.show(render([{"prompt": BEGUN}], tokenizer).tokens.tokens) == opened
    assert tokenizer.show(encode_prompts([Observation(messages=BEGUN)], tokenizer)[0]) == opened
    shown = demonstrate([{"prompt": BEGUN, "completion": "4"}], tokenizer).tokens.tokens
    assert tokenizer.show(shown) == f"{opened}4<|end|>"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "2+2?", "tools": [TOOL]}, "tools beside"),
        ({"prompt": BEGUN[:1], "tools": [TOOL]}, "never shows"),
        ({"prompt": BEGUN[:1], "tools": ["look"]}, "tool 0"),
        ({"prompt": [{**BEGUN[0], "mood": "calm"}]}, "'mood'"),
        ({"prompt": [BEGUN[0], {**BEGUN[1], "thinking": "a"}, BEGUN[0]]}, "thinking, a thought"),
    ],
)
def test_what_a_prompts_template_would_pass_over_is_named_with_its_row(tokenizer, row, fault):
    rows = [{"prompt": "a", "completion": "b"}, {"completion": "b", **row}]
    for read in (render, demonstrate):
        with pytest.raises(DataError, match=f"row 1 .*{fault}"):
            read(rows, tokenizer)


def test_text_gets_the_beginning_of_sequence_once_and_messages_never(tokenizer):
    beginning = tokenizer.encode("B")[0]
    with_prefix = evolve(tokenizer, prompt_prefix=(beginning,))
    messages = [{"role": "user", "content": "hi"}]
    observations = [Observation(text="1+1="), Observation(text="B1+1="), Observation(messages=messages)]
    encoded = encode_prompts(observations, with_prefix)
    assert encoded == [tokenizer.encode("B1+1="), tokenizer.encode("B1+1="), tokenizer.encode("user: hi\nassistant: ")]


@given(data=st.lists(texts, min_size=1, max_size=12), chunk=st.integers(1, 5))
def test_all_prompts_are_rendered_whatever_the_chunks(tokenizer, data, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixes, "CHUNK_ROWS", chunk)
        rendered = render(rows_of(*data), tokenizer)
    assert [tokenizer.decode(rendered.tokens.sequence(i)) for i in range(len(data))] == data
    assert rendered.rows.tolist() == list(range(len(data)))
    assert rendered.num_dropped == 0


@given(data=st.lists(texts, min_size=1, max_size=12), limit=st.integers(1, 12))
def test_prompts_over_the_limit_are_dropped_and_counted(tokenizer, data, limit):
    short = [index for index, text in enumerate(data) if len(text) <= limit]
    if not short:
        with pytest.raises(DataError, match=f"all {len(data)} rows"):
            render(rows_of(*data), tokenizer, DROP, limit)
        return
    rendered = render(rows_of(*data), tokenizer, DROP, limit)
    assert rendered.rows.tolist() == short
    assert rendered.num_dropped == len(data) - len(short)
    assert rendered.tokens.lengths.tolist() == [len(data[index]) for index in short]


def test_prompts_over_the_limit_are_an_error_that_names_both_remedies(tokenizer):
    with pytest.raises(DataError) as raised:
        render(rows_of("1+1=", "1111+1=", "1+1=", "11+11="), tokenizer, limit=5)
    message = str(raised.value)
    assert "data.train: row 1 (the first is 0) has a prompt of 7 tokens; expected at most 5" in message
    assert "1 more of the 4 rows are over the limit" in message
    assert "Raise rollout.max_prompt_tokens" in message
    assert 'data.train.on_long_prompt = "drop"' in message


def test_rows_of_a_jsonl_file_are_named_by_their_line(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1"}\n\n\n{"prompt": "1+1+1="}\n')
    rows = load_rows(DatasetConfig(source="jsonl", path=str(path)), "train", None)
    with pytest.raises(DataError, match=r"row 1 \(.*line 4 .*\) .* 6 tokens"):
        render(rows, tokenizer, limit=5)
    with pytest.raises(DataError, match=r"row 0 \(.*line 1 .*\): .* 'completion'"):
        demonstrate(rows, tokenizer)


def test_an_environments_prompts_are_checked_where_given(tokenizer):
    def observe(rows):
        return [Observation(text=f"Solve {row['problem']}") for row in rows]

    rendered = render([{"problem": "1+1="}], tokenizer, observe=observe)
    assert tokenizer.decode(rendered.tokens.tokens) == "Solve 1+1="
    with pytest.raises(DataError, match="a prompt of 10 tokens"):
        render([{"problem": "1+1="}], tokenizer, limit=9, observe=observe)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, r"row 1 \(the first is 0\): found fields 'question'; expected a prompt"),
        ({"prompt": 3}, r"row 1 .*found int 3"),
        ({"prompt": ""}, r"row 1 .*found an empty text"),
    ],
)
def test_a_row_without_a_prompt_is_named(tokenizer, row, message):
    with pytest.raises(DataError, match=message):
        render([{"prompt": "a"}, row], tokenizer)


def test_a_prompt_without_tokens_is_named(tokenizer):
    with pytest.raises(DataError, match="row 0 .* no tokens"):
        render([{}], tokenizer, observe=lambda rows: [Observation(text="") for _ in rows])


pairs = st.lists(st.tuples(texts, st.text("0123456789", min_size=1, max_size=6)), min_size=1, max_size=8)


@given(data=pairs, draw=st.data())
def test_demonstrations_learn_the_completion_and_the_end(tokenizer, data, draw):
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in data]
    demonstrations = demonstrate(rows, tokenizer)
    picks = draw.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    samples = example_batch(demonstrations, np.asarray(picks, np.int64))
    batch = samples.batch
    for number, pick in enumerate(picks):
        tokens = batch.tokens[batch.offsets[number] : batch.offsets[number + 1]]
        mask = batch.loss_mask[batch.offsets[number] : batch.offsets[number + 1]]
        prompt, completion = data[pick]
        assert tokenizer.decode(tokens[~mask]) == prompt
        assert tokens[mask].tolist() == [*tokenizer.encode(completion), tokenizer.eos_token_id]
    assert samples.group_ids.tolist() == batch.sequence_columns["group_ids"].tolist() == list(range(len(picks)))
    assert samples.valid.all()
    assert not samples.rewards.any()
    assert set(samples.finish_reasons.tolist()) == {FinishReason.STOP}
    assert not batch.token_columns


def test_a_completion_that_ends_itself_gets_no_second_end(tokenizer):
    demonstrations = demonstrate([{"prompt": "1+1=", "completion": "2<|end|>"}], tokenizer)
    assert demonstrations.tokens.tokens.tolist() == [*tokenizer.encode("1+1=2"), tokenizer.eos_token_id]


def test_a_chat_prompt_is_followed_by_the_completion(tokenizer):
    demonstrations = demonstrate([{"prompt": [{"role": "user", "content": "1+1="}], "completion": "2"}], tokenizer)
    assert tokenizer.decode(demonstrations.tokens.tokens) == "user: 1+1=\nassistant: 2"


def test_long_completions_count_their_end_and_are_dropped_or_named(tokenizer):
    rows = [{"prompt": "1=", "completion": completion} for completion in ("12", "123", "1")]
    dropped = demonstrate(rows, tokenizer, DROP, response_limit=3)
    assert (dropped.rows.tolist(), dropped.num_dropped) == ([0, 2], 1)
    with pytest.raises(DataError, match=r"row 1 .* 4 tokens; .* 3 \(rollout\.max_response_tokens\)"):
        demonstrate(rows, tokenizer, response_limit=3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "answer": "b"},
            r"row 0 .*only 'prompt', 'answer'.*data\.train\.completion_field",
        ),
        ({"prompt": "a", "completion": 7}, r"row 0 .*found int 7; expected the completion to learn, as text"),
        ({"prompt": "a", "completion": ""}, r"row 0 .*found an empty completion; expected .*Leave the row out"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": " \n"}, r"row 0 .*found an empty completion"),
    ],
)
def test_a_row_without_a_completion_is_named(tokenizer, row, message):
    with pytest.raises(DataError, match=message):
        demonstrate([row], tokenizer)


def test_demonstrations_need_an_end_of_sequence(tokenizer):
    with pytest.raises(ModelError) as raised:
        demonstrate(rows_of("1"), evolve(tokenizer, stop_token_ids=()))
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("model.path", "a tokenizer without an end-of-sequence token")
