"""What was sampled among, noted beside both of vLLM's model runners: through partial prefills, preemption and lookahead."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlcore.spi import SamplingParams
from rlcore_vllm.engines.recorder import RecordedRequest
from rlcore_vllm.engines.sampling_masks import MaskRecorder, truncates

VOCABULARY = 9


class Slots:
    """The parts of model runner V2 that the recorder touches."""

    def __init__(self):
        self.req_states = SimpleNamespace(req_id_to_index={})
        self.sampler = SimpleNamespace(sample=self.sample)

    def sample(self, logits, expanded_idx_mapping, pos, return_logprobs=False):
        return logits.argmax(-1), logits

    def step(self, rows):
        """`rows`: (request, position of the token that is sampled, kept tokens) each; a request is put in any slot."""
        slots = self.req_states.req_id_to_index
        for request, _, _ in rows:
            if request is not None and request not in slots:
                slots[request] = max(slots.values(), default=-1) + 1
        index = torch.tensor([-1 if request is None else slots[request] for request, _, _ in rows])
        before = torch.tensor([position - 1 for _, position, _ in rows])
        self.sampler.sample(logits_of(rows), expanded_idx_mapping=index, pos=before)


class Batch:
    """The parts of the older model runner."""

    def __init__(self):
        self.input_batch = SimpleNamespace(req_ids=[], num_tokens_no_spec=np.zeros(8, np.int64))
        self.sampler = SimpleNamespace(sample=self.sample)

    def sample(self, logits, sampling_metadata):
        return logits.argmax(-1), logits.log_softmax(-1)

    def step(self, rows):
        self.input_batch.req_ids = [request for request, _, _ in rows]
        self.input_batch.num_tokens_no_spec[: len(rows)] = [position for _, position, _ in rows]
        self.sampler.sample(logits_of(rows), None)


def logits_of(rows):
    logits = torch.full((len(rows), VOCABULARY), -torch.inf)
    for row, (_, _, kept) in enumerate(rows):
        logits[row, kept] = torch.arange(len(kept), dtype=torch.float32)
    return logits


def fetched(recorder, request, prompt_length, num_tokens):
    (mask,) = recorder.fetch([RecordedRequest(request=request, prompt_length=prompt_length, num_tokens=num_tokens)])
    return mask


def lists(mask):
    return [mask.tokens[start:end].tolist() for start, end in zip(mask.offsets[:-1], mask.offsets[1:], strict=True)]


@pytest.fixture(params=[Slots, Batch])
def runner(request):
    return request.param()


def test_each_token_keeps_what_it_was_sampled_among(runner):
    recorder = MaskRecorder(runner)
    recorder.expect("a")
    recorder.expect("b")
    runner.step([("other", 4, [0, 1, 2])])
    runner.step([("a", 3, [5])])  # a part of its prompt samples a token that nobody wants
    runner.step([("b", 2, [1, 3]), ("other", 5, [4]), ("a", 3, [0, 7, 8])])
    runner.step([("a", 4, [2]), ("b", 3, [6, 8])])
    runner.step([("b", 4, [3]), ("a", 5, [1, 2])])  # one step more than is fetched, as lookahead takes
    assert lists(fetched(recorder, "a", 3, 2)) == [[0, 7, 8], [2]]
    assert lists(fetched(recorder, "b", 2, 3)) == [[1, 3], [6, 8], [3]]


def test_a_request_that_is_computed_anew_goes_on_where_it_was(runner):
    recorder = MaskRecorder(runner)
    recorder.expect("a")
    runner.step([("a", 2, [1, 2])])
    runner.step([("b", 1, [0])])
    runner.step([("b", 2, [3]), ("a", 3, [4, 5])])
    assert lists(fetched(recorder, "a", 2, 2)) == [[1, 2], [4, 5]]


def test_what_was_not_noted_is_not_made_up(runner):
    recorder = MaskRecorder(runner)
    recorder.expect("a")
    runner.step([("a", 2, [1, 2])])
    with pytest.raises(RuntimeError, match="its token 3 among"):
        fetched(recorder, "a", 2, 2)


def test_nothing_is_noted_of_what_is_forgotten_or_fetched(runner):
    recorder = MaskRecorder(runner)
    recorder.expect("a")
    recorder.expect("b")
    runner.step([("a", 2, [1]), ("b", 2, [2])])
    recorder.forget(["a", "never expected"])
    assert lists(fetched(recorder, "b", 2, 1)) == [[2]]
    runner.step([("a", 3, [1]), ("b", 3, [2])])
    for request in "ab":
        with pytest.raises(KeyError):
            fetched(recorder, request, 2, 1)


def test_rows_of_no_request_are_left_out():
    runner = Slots()
    recorder = MaskRecorder(runner)
    recorder.expect("a")
    runner.step([("a", 2, [1, 4]), (None, 1, [3])])
    assert lists(fetched(recorder, "a", 2, 1)) == [[1, 4]]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.0, top_k=3), False),
        (SamplingParams(top_k=3), True),
        (SamplingParams(top_p=0.9), True),
    ],
)
def test_whether_sampling_leaves_tokens_out(sampling, expected):
    assert truncates(sampling) == expected
