"""Answers of a data set as batches: groups, rewards, and what the loss counts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcore.run.data.examples import Examples, example_batch
from rlcore.spi import FinishReason, RaggedTokens
from rlcore.spi.arrays import offsets_of


@given(answers=st.sampled_from([1, 2]), data=st.data())
def test_the_answers_of_a_row_are_a_group_in_their_order(answers: int, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=answers, max_size=12))
    parts = parts[: len(parts) // answers * answers]
    offsets = offsets_of([prompt + answer for prompt, answer in parts])
    examples = Examples.behind_prompts(
        RaggedTokens(tokens=np.arange(offsets[-1], dtype=np.int32), offsets=offsets),
        np.asarray([prompt for prompt, _ in parts]),
        answers=answers,
        rows=np.arange(len(parts) // answers),
        num_dropped=0,
    )
    picks = data.draw(st.lists(st.integers(0, len(parts) // answers - 1), min_size=1, max_size=5))
    samples = example_batch(examples, np.asarray(picks, np.int64))
    sequences = [pick * answers + side for pick in picks for side in range(answers)]
    for number, sequence in enumerate(sequences):
        tokens = slice(*samples.batch.offsets[number : number + 2])
        assert samples.batch.tokens[tokens].tolist() == examples.tokens.sequence(sequence).tolist()
        prompt, answer = parts[sequence]
        assert samples.batch.loss_mask[tokens].tolist() == [False] * prompt + [True] * answer
    assert samples.group_ids.tolist() == [group for group in range(len(picks)) for _ in range(answers)]
    assert samples.rewards.tolist() == ([0.0] if answers == 1 else [1.0, 0.0]) * len(picks)
    assert samples.valid.all()
    assert set(samples.finish_reasons.tolist()) == {FinishReason.STOP}
