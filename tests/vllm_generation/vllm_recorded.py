"""The parts of vLLM's model runner V2 that recorders touch, and requests that come, are preempted and end in any order."""

from types import SimpleNamespace

import numpy as np
import torch

from rlcore_vllm.engines.recorder import RecordedRequest

VOCABULARY = 11
SLOTS = 3
POSITIONS = 40
TABLE_BYTES = (SLOTS + 1) * POSITIONS * 4


class Runner:
    """Slots of requests, and a sampler."""

    def __init__(self) -> None:
        self.max_num_reqs, self.max_model_len, self.device = SLOTS, POSITIONS, torch.device("cpu")
        self.req_states = SimpleNamespace(req_id_to_index={}, prefill_len=SimpleNamespace(np=np.zeros(SLOTS, np.int64)))
        self.sampler = SimpleNamespace(sample=self.sample)

    def sample(self, logits, expanded_idx_mapping, pos, return_logprobs=False):
        generator = torch.Generator().manual_seed(int(pos.sum()) + 1)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0], logits

    def _remove_request(self, request: str) -> bool:
        return self.req_states.req_id_to_index.pop(request, None) is not None

    def remove(self, request: str) -> bool:
        """As vLLM calls it, when a request has ended or is preempted."""
        return self._remove_request(request)

    def add(self, request: str, prefill_length: int) -> None:
        slot = next(slot for slot in range(SLOTS) if slot not in self.req_states.req_id_to_index.values())
        self.req_states.req_id_to_index[request] = slot
        self.req_states.prefill_len.np[slot] = prefill_length

    def step(self, requests: dict[str, int], random: torch.Generator) -> dict[str, float]:
        """Sample one token for each request, given the position of the token before; returns the log-probabilities."""
        logits = torch.randn(len(requests), VOCABULARY, generator=random)
        slots = torch.tensor([self.req_states.req_id_to_index[request] for request in requests])
        sampled, _ = self.sampler.sample(logits, expanded_idx_mapping=slots, pos=torch.tensor(list(requests.values())))
        expected = logits.double().log_softmax(-1)[torch.arange(len(requests)), sampled]
        return dict(zip(requests, expected.tolist(), strict=True))


def assert_every_token_keeps_its_own(runner, recorder, tell, work, choices):
    """`work` are requests of (prompt length, tokens), more of them than there are slots; `tell()` comes before each step, as
    the engine calls it."""
    random = torch.Generator().manual_seed(0)
    waiting = {f"r{index}": (prompt, count, []) for index, (prompt, count) in enumerate(work)}
    running: dict[str, tuple[int, int, list[float]]] = {}
    ended = {}
    while waiting or running:
        while waiting and len(running) < SLOTS:
            request = choices.choice(sorted(waiting))
            prompt, count, found = running[request] = waiting.pop(request)
            recorder.expect(request, prompt + count)
            tell()
            runner.add(request, prompt + len(found))
            if choices.random() < 0.5 and prompt + len(found) > 1:  # a part of the prefill samples a token that nobody wants
                runner.step({request: choices.randrange(prompt + len(found) - 1)}, random)
        taking_part = [request for request in running if choices.random() < 0.8]
        if taking_part:
            positions = {request: running[request][0] + len(running[request][2]) - 1 for request in taking_part}
            for request, logprob in runner.step(positions, random).items():
                running[request][2].append(logprob)
        for request in list(running):
            prompt, count, found = running[request]
            if len(found) == count:
                ended[request] = running.pop(request)
                if choices.random() < 0.7 or len(ended) > 1:
                    runner.remove(request)
            elif choices.random() < 0.2:
                waiting[request] = running.pop(request)
                runner.remove(request)
        for request in list(runner.req_states.req_id_to_index):
            if request not in running:
                runner.remove(request)
    asked = [
        RecordedRequest(request=request, prompt_length=prompt, num_tokens=count)
        for request, (prompt, count, _) in ended.items()
    ]
    for one, found in zip(asked, recorder.fetch(asked), strict=True):
        np.testing.assert_allclose(found, ended[one.request][2], atol=1e-5)
        assert found.dtype == np.float32
    assert recorder.fetch([]) == []
    for request in ended:
        runner.remove(request)
    assert recorder.device_bytes == TABLE_BYTES, "rows that were fetched are kept"
