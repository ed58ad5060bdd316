"""What a session records, whatever its client sends: each answer once, behind the very tokens that it was sampled behind."""

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import FinishReason
from rlcore_serve.sessions.interface import Sample, SampleRequest
from rlcore_serve.sessions.requests import read_request
from rlcore_serve.sessions.session import Session, Sessions

from .chat_model import END_ID, START_ID, Script, served, user

TEXT = st.text("aé \n☃<", max_size=4)
NOTHING, ANEW, EDITED = "as it was", "begins anew", "edits an answer"
SampledPart = tuple[tuple[int, ...], tuple[int, ...], float]
"""A prompt, the tokens sampled behind it, and the first one's log-probability."""


class Random(Script):
    """Says tokens drawn from a seed, some of them the beginnings of messages, and ends by a stop token or by its length."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[SampledPart] = []
        self.num_open = 0

    async def sample(self, request: SampleRequest) -> Sample:
        random = np.random.default_rng(request.seed)
        self.num_open += 1
        for _ in range(random.integers(3)):
            await asyncio.sleep(0)
        ends = bool(random.integers(2))
        tokens = random.choice([*map(ord, "ab é\n"), START_ID], random.integers(0 if ends else 1, 4)).astype(np.int32)
        tokens = np.append(tokens, np.int32(END_ID)) if ends else tokens
        logprobs = -random.random(len(tokens), np.float32)
        self.said.append((tuple(request.prompt.tolist()), tuple(tokens.tolist()), float(logprobs[0])))
        return Sample(
            text=self.tokenizer.decode(tokens.tolist()),
            tokens=tokens,
            logprobs=logprobs,
            weight_versions=np.full(len(tokens), self.num_open, np.int32),
            finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
        )


Request = tuple[int, str, str, int]
"""Which of the conversations so far it goes on from, how it treats that, the text that it adds, and `n`."""
REQUESTS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([NOTHING, NOTHING, ANEW, EDITED]), TEXT, st.integers(1, 2)),
        min_size=1,
        max_size=3,
    ),
    max_size=4,
)
"""Rounds of requests that are sent at once."""


async def converse(generator: Random, session: Session, rounds: list[list[Request]]) -> None:
    model = served(generator, history="segment")
    known: list[list[dict[str, Any]]] = [[]]

    async def ask(request: Request) -> list[list[dict[str, Any]]]:
        place, treatment, text, number = request
        messages = [] if treatment == ANEW else [dict(message) for message in known[place % len(known)]]
        if treatment == EDITED and messages:
            messages[-1]["content"] += "!"
        messages.append(user(text))
        body = {"model": "policy", "messages": messages, "n": number}
        answered = await model.answer(session, model.prepare(session, read_request(body, model.sampling, is_chat=True)))
        return [[*messages, {"role": "assistant", "content": choice.content}] for choice in answered.choices]

    for requests in rounds:
        for answers in await asyncio.gather(*(ask(request) for request in requests)):
            known += answers


def learnt(session: Session, sessions: Sessions) -> Counter[SampledPart]:
    """The answers in the loss, each with all that stands before it in its sequence."""
    found: Counter[SampledPart] = Counter()
    for segment in sessions.finish(session):
        assert not segment.logprobs[segment.weight_versions == -1].any()
        # An answer is of a weight version of its own here: where that changes, one ends.
        bounds = np.flatnonzero(np.diff(segment.weight_versions, prepend=-2, append=-2))
        for start, end in pairwise(bounds):
            mask = segment.loss_mask[start:end]
            assert mask.all() or not mask.any()
            if mask.any():
                before, said = segment.tokens[:start].tolist(), segment.tokens[start:end].tolist()
                found[tuple(before), tuple(said), float(segment.logprobs[start])] += 1
    return found


@settings(max_examples=50, deadline=None)
@given(rounds=REQUESTS, seed=st.integers(0, 2**32))
def test_each_answer_is_in_the_loss_once_behind_what_it_was_sampled_behind(rounds: list[list[Request]], seed: int) -> None:
    generator, sessions = Random(), Sessions()
    session = sessions.open(seed=(seed,))
    asyncio.run(converse(generator, session, rounds))
    assert learnt(session, sessions) == Counter(generator.said)


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_a_chat_that_goes_on_reads_what_its_template_writes(texts: list[str], seed: int) -> None:
    """But for white space, and for special tokens that were sampled, which are no text."""
    generator, sessions = Random(), Sessions()
    session, messages = sessions.open(seed=(seed,)), list[dict[str, Any]]()
    model, tokenizer = served(generator), generator.tokenizer
    for text in texts:
        messages.append(user(text))
        request = read_request({"model": "policy", "messages": messages}, model.sampling, is_chat=True)
        answered = asyncio.run(model.answer(session, model.prepare(session, request)))
        found, expected = generator.said[-1][0], tokenizer.encode(tokenizer.render_chat(messages))
        assert "".join(tokenizer.decode(found).split()) == "".join(tokenizer.decode(expected).split())
        messages.append({"role": "assistant", "content": answered.choices[0].content})
    assert len(sessions.finish(session)) == 1
