"""Dealing: every prompt once, to a host with the least work under way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import GenerateRequest, RaggedTokens, SamplingParams, WorkerError
from rlcore_ray.request_router import RequestRouter


def dealer_of(num_hosts: int) -> RequestRouter:
    router = RequestRouter(num_hosts)
    for host in range(num_hosts):
        router.join(host)
    return router


def request_of(limits: list[list[int]], first: int, conversations: list[int] | None = None) -> GenerateRequest:
    """Prompts of one token, which is their number, and samples whose seeds are theirs in the stream."""
    flat = np.array(limits, np.int32).reshape(-1)
    return GenerateRequest(
        prompts=RaggedTokens.from_lists([[prompt] for prompt in range(len(limits))]),
        num_samples=len(limits[0]),
        seeds=np.arange(first, first + len(flat)),
        max_tokens=flat,
        sampling=SamplingParams(),
        weight_version=0,
        conversations=None if conversations is None else np.array(conversations),
    )


@st.composite
def limits_of_a_request(draw: st.DrawFn) -> list[list[int]]:
    num_samples = draw(st.integers(1, 3))
    rows = st.lists(st.integers(1, 100), min_size=num_samples, max_size=num_samples)
    return draw(st.lists(rows, min_size=1, max_size=6))


@settings(deadline=None)
@given(requests=st.lists(limits_of_a_request(), max_size=6), num_hosts=st.integers(1, 4), data=st.data())
def test_every_prompt_goes_whole_to_a_host_with_the_least_work(
    requests: list[list[list[int]]], num_hosts: int, data: st.DataObject
) -> None:
    router, first = dealer_of(num_hosts), 0
    under_way: list[dict[int, int]] = [{} for _ in range(num_hosts)]
    for limits in requests:
        request = request_of(limits, first)
        before = [sum(one.values()) for one in under_way]
        work = [sum(row) for row in limits]
        num_samples, count = request.num_samples, 0
        after = list(before)
        for host, (numbers, part) in router.dispatch(request).items():
            assert part.seeds.tolist() == numbers.tolist(), "each sample under its own number"
            prompts = part.prompts.tokens.tolist()
            assert part.max_tokens.tolist() == [limit for prompt in prompts for limit in limits[prompt]]
            assert len(numbers) == len(prompts) * num_samples, "a prompt's samples stay together"
            under_way[host] |= dict(zip(numbers.tolist(), part.max_tokens.tolist(), strict=True))
            after[host] += sum(work[prompt] for prompt in prompts)
            count += len(numbers)
        assert count == len(request.seeds)
        first += count
        spread = max(after) - min(after)
        assert spread <= max(max(before) - min(before), max(work)), "no host waits while another one's work piles up"
        for host, one in enumerate(under_way):
            ended = sorted(data.draw(st.sets(st.sampled_from(sorted(one))))) if one else []
            router.done(host, np.array(ended, np.int64))
            for number in ended:
                del one[number]
            assert router.is_busy(host) == bool(one)


def hosts_of(router: RequestRouter, limits: list[list[int]], first: int, conversations: list[int]) -> list[int]:
    """The host of each of some conversations, of one sample each."""
    found = dict[int, int]()
    for host, (_, part) in router.dispatch(request_of(limits, first, conversations)).items():
        assert part.conversations is not None
        found |= dict.fromkeys(part.conversations.tolist(), host)
    return [found[conversation] for conversation in conversations]


def test_a_conversation_stays_on_its_host() -> None:
    router, talks = dealer_of(3), [7, 3, 11, 4, 5, 6]
    first = hosts_of(router, [[10]] * 6, 0, talks)
    assert sorted(first) == [0, 0, 1, 1, 2, 2]
    for turn in range(1, 4):
        later = np.random.default_rng(turn).permutation(6).tolist()
        found = hosts_of(router, [[10]] * 6, 6 * turn, [talks[place] for place in later])
        assert found == [first[place] for place in later]


def test_a_host_with_much_more_to_do_gives_its_conversations_away() -> None:
    router = dealer_of(2)
    found = [hosts_of(router, [[10]], number, [1])[0] for number in range(9)]  # samples of one, which do not end
    assert min(found.count(host) for host in (0, 1)) >= 3
    (before,) = hosts_of(router, [[1000]], 9, [2])
    (after,) = hosts_of(router, [[10]], 10, [2])
    assert after != before


def test_samples_of_no_conversation_go_where_there_is_least_to_do() -> None:
    router = dealer_of(2)
    found = [next(iter(router.dispatch(request_of([[10]], number, [-1])))) for number in range(4)]
    assert found == [0, 1, 0, 1]


@settings(deadline=None)
@given(limits=limits_of_a_request(), data=st.data())
def test_what_a_host_that_leaves_has_under_way_is_dealt_again_under_its_numbers(
    limits: list[list[int]], data: st.DataObject
) -> None:
    router, num_samples = dealer_of(3), len(limits[0])
    dealt = router.dispatch(request_of(limits, 0, conversations=list(range(len(limits) * num_samples))))
    host = data.draw(st.sampled_from(sorted(dealt)))
    taken = dealt[host][0].tolist()
    ended = data.draw(st.sets(st.sampled_from(taken)))
    router.done(host, np.array(sorted(ended), np.int64))
    owed = router.leave(host)
    assert sorted(number for numbers, _ in owed for number in numbers.tolist()) == sorted(set(taken) - ended)
    assert not router.is_busy(host)
    again = [part for numbers, request in owed for part in router.dispatch(request, numbers).items()]
    assert host not in {other for other, _ in again}
    for _, (numbers, part) in again:
        assert part.seeds.tolist() == part.conversations.tolist() == numbers.tolist()
        prompts = np.repeat(part.prompts.tokens, part.num_samples)
        assert prompts.tolist() == [number // num_samples for number in numbers.tolist()]
        assert part.max_tokens.tolist() == [limits[number // num_samples][number % num_samples] for number in numbers.tolist()]
        assert part.num_samples in (1, num_samples)
    new = [number for numbers, _ in router.dispatch(request_of(limits, 0)).values() for number in numbers.tolist()]
    assert min(new) == len(limits) * num_samples, "new samples get new numbers"
    router.join(host)
    assert set(router.dispatch(request_of([[1]], 0))) == {host}, "it has nothing to do"


def test_a_host_that_retires_gets_nothing_more_and_keeps_what_it_has() -> None:
    router = dealer_of(2)
    (first,) = router.dispatch(request_of([[5]], 0)).items()
    host, (numbers, _) = first
    router.retire(host)
    assert set(router.dispatch(request_of([[1], [1], [1]], 1))) == {1 - host}
    assert router.is_busy(host)
    router.done(host, numbers)
    assert not router.is_busy(host)


def test_with_no_host_nothing_can_be_dealt() -> None:
    router = RequestRouter(1)
    with pytest.raises(WorkerError, match="no engine"):
        router.dispatch(request_of([[1]], 0))
