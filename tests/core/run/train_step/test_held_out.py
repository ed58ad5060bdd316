"""Held-out rows that the algorithm measures: which, when, and by whose log-probabilities."""

import numpy as np

from rlcore.run.data.examples import Examples
from rlcore.run.train_step.held_out import HeldOutExamples
from rlcore.spi import RaggedTokens
from rlcore.spi.execution import Backends


class Algorithm:
    """Notes what it is given."""

    class needs:  # noqa: N801
        reference_logprobs, head = True, "tokens"

    def measure(self, examples, logprobs, reference):
        return {"rows": float(len(examples.rewards)), "gap": float((logprobs - reference).sum())}


class Trainer:
    """Each token of the policy has minus its version, each of the reference minus 10."""

    def __init__(self):
        self.asked = []

    def logprobs(self, batch, sequences, model, weight_version):
        self.asked.append(model)
        assert sequences.tolist() == list(range(batch.num_sequences))
        return np.full(batch.num_tokens, -10.0 if model == "reference" else -float(weight_version), np.float32)


def test_the_present_weights_are_asked_each_time_and_the_reference_once():
    tokens = RaggedTokens(tokens=np.zeros(9, np.int32), offsets=np.array([0, 3, 6, 9], np.int64))
    examples = Examples.behind_prompts(tokens, np.ones(3, np.int64), answers=1, rows=np.arange(3), num_dropped=0)
    trainer = Trainer()
    held_out = HeldOutExamples.of(examples, np.arange(2), Algorithm(), Backends(trainer=trainer, generator=None, route=None))
    assert held_out.evaluate(1) == {"eval/rows": 2.0, "eval/gap": 6 * 9.0}
    assert held_out.evaluate(4) == {"eval/rows": 2.0, "eval/gap": 6 * 6.0}
    assert trainer.asked == ["policy", "reference", "policy"]


class Numbered(Trainer):
    """A token's log-probability is its own number in the batch, the reference's is 0."""

    def logprobs(self, batch, sequences, model, weight_version):
        return np.arange(batch.num_tokens, dtype=np.float32) * (model == "policy")


def test_each_of_several_sets_has_the_figures_of_its_own_rows():
    """Pairs, of sequences of 1 to 6 tokens; the first row is over a limit, the last is not measured."""
    lengths = np.arange(1, 7)
    tokens = RaggedTokens(tokens=np.zeros(21, np.int32), offsets=np.concatenate([[0], np.cumsum(lengths)]))
    examples = Examples.behind_prompts(tokens, np.ones(6, np.int64), answers=2, rows=np.array([1, 3, 5]), num_dropped=1)
    backends = Backends(trainer=Numbered(), generator=None, route=None)
    held_out = HeldOutExamples.of(examples, np.array([1, 3]), Algorithm(), backends, ["sums", "words"])
    assert held_out.evaluate(0) == {
        "eval/rows": 4.0,
        "eval/gap": float(sum(range(10))),
        "eval/rows/sums": 2.0,
        "eval/gap/sums": float(sum(range(3))),
        "eval/rows/words": 2.0,
        "eval/gap/words": float(sum(range(3, 10))),
    }
