"""Pieces of several adapters in shared passes equal those by turns."""

from collections.abc import Callable
from functools import cache
from itertools import count

import numpy as np
import pytest
import torch
from attrs import evolve
from fsdp2_lora_cases import DROPOUT
from fsdp2_support import ALPHABET, WEIGHTED, make_config
from fsdp2_together_cases import CALM, LAYOUTS, results_file, run_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_support import SPEC, lora_context
from rank_launch import launch_rows
from together_support import (
    LIKELIHOOD,
    TOLERANCE,
    Round,
    assert_close,
    assert_same_tensors,
    by_turns,
    gradients,
    in_one_call,
    play,
    random_piece,
    saved,
)

from rlcore.spi import ContractError, LossSpec, NonFiniteError, UseAdapterRequest
from rlcore_fsdp2.adapters import grouped_low_rank, has_grouped_products, low_rank
from rlcore_fsdp2.adapters_together import planned
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_torchkit.testing.models import make_model

NAMES = ("", "a", "b", "c")
KINDS = {
    "plain": ("qwen3", {}, {}, 40),
    "bias": ("qwen2", {}, {}, None),
    "experts": ("qwen3_moe", {}, {}, 40),
    "dropout": ("qwen3", {}, {"dropout": DROPOUT}, None),
    "grouped": ("qwen3", {}, {"rank": 4}, 40),
    "grouped, checkpointing": ("qwen3", {"activation_checkpointing": True}, {"rank": 4, "dropout": DROPOUT}, 40),
    "checkpointing": ("qwen3", {"activation_checkpointing": True}, {"dropout": DROPOUT}, 40),
}
"""Family, the trainer's options, those of [lora], and most tokens of a pass."""
FEW = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = count()


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Fsdp2Backend, Fsdp2Backend]]:
    """Two equal trainers of a kind."""
    root = tmp_path_factory.mktemp("together")

    @cache
    def made(kind: str) -> tuple[Fsdp2Backend, Fsdp2Backend]:
        family, options, lora, bound = KINDS[kind]
        if not (root / "models" / family).is_dir():
            make_model(root / "models" / family, family, tied=family != "qwen3_moe", num_layers=2, alphabet=ALPHABET)
        context = lora_context(root / "models" / family, evolve(SPEC, **lora), optimizer=CALM)
        context = evolve(context, max_microbatch_tokens=bound)
        return Fsdp2Backend(context, make_config(**options)), Fsdp2Backend(context, make_config(**options))

    return made


@st.composite
def games(draw: st.DrawFn) -> tuple[dict[str, int], list[Round]]:
    """Adapters with their seeds, and rounds of pieces and updates."""
    names = NAMES[: draw(st.integers(1, 4))]
    rounds = []
    for _ in range(draw(st.integers(2, 4))):
        chosen = draw(st.permutations(names))[: draw(st.integers(1, len(names)))]
        pieces = {}
        for name in chosen:
            piece = random_piece(
                draw(st.integers(0, 10**6)),
                num_microbatches=draw(st.integers(1, 3)),
                loss=draw(st.sampled_from([WEIGHTED, LIKELIHOOD])),
                max_length=draw(st.sampled_from([3, 11, 24])),
            )
            pieces[name] = evolve(piece, temperature=draw(st.sampled_from([1.0, 1.3])))
        updates = draw(st.lists(st.sampled_from(names), unique=True))
        rounds.append(Round(pieces=pieces, updates=tuple(updates)))
    rounds.append(evolve(rounds[-1], updates=names))
    return {name: draw(st.integers(0, 100)) for name in names}, rounds


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(game=games())
def test_together_equals_by_turns(kind, backends, tmp_path, game):
    seeds, rounds = game
    shared, alone = backends(kind)
    assert_close(play(shared, rounds, seeds, together=True), play(alone, rounds, seeds, together=False))
    directory = tmp_path / str(next(NUMBERS))
    for number, name in enumerate(seeds):
        found, expected = (
            saved(one, name, directory / f"{number}-{what}") for one, what in ((shared, "together"), (alone, "by turns"))
        )
        assert_same_tensors(found, expected, TOLERANCE)


def test_adapters_share_no_beginnings(backends):
    """All sequences of all adapters begin alike, which one adapter computes once."""
    shared, alone = backends("bias")
    piece = random_piece(3, num_microbatches=2)
    alike = tuple(
        evolve(one, tokens=np.concatenate([np.arange(length, dtype=np.int32) for length in one.lengths]))
        for one in piece.microbatches
    )
    pieces = dict.fromkeys(NAMES, evolve(piece, microbatches=alike))
    rounds, seeds = [Round(pieces=pieces, updates=NAMES)] * 2, {name: seed for seed, name in enumerate(NAMES)}
    assert_close(play(shared, rounds, seeds, together=True), play(alone, rounds, seeds, together=False))


NAN = LossSpec(path="fsdp2_support:nan_loss", config=-1e9, token_columns=("advantages",))
RAISING = LossSpec(path="fsdp2_support:raising_loss", config=None, token_columns=())


@pytest.mark.parametrize(("loss", "error"), [(NAN, NonFiniteError), (RAISING, ZeroDivisionError)])
def test_failure_leaves_the_gradients_of_all(loss, error, backends):
    """Gradients of earlier pieces and of the adapter in use stay; the same pieces can be added by turns behind it."""
    shared, alone = backends("dropout")
    first = {name: random_piece(seed, num_microbatches=2) for seed, name in enumerate(NAMES[:3])}
    second = {name: evolve(random_piece(9 + seed, num_microbatches=1), piece=1) for seed, name in enumerate(NAMES[:3])}
    for backend in (shared, alone):
        for seed, name in enumerate(first):
            backend.use_adapter(UseAdapterRequest(name=name, seed=seed))
        in_one_call(backend, first)
    before = {name: gradients(shared, name) for name in first}
    shared.use_adapter(UseAdapterRequest(name="a"))
    with pytest.raises(error):
        in_one_call(shared, second | {"b": evolve(second["b"], loss=loss)})
    for name, held in before.items():
        assert_same_tensors(gradients(shared, name), held, 0.0)
    by_turns(shared, second)
    by_turns(alone, second)
    for name in first:
        assert_same_tensors(gradients(shared, name), gradients(alone, name), 0.0)


def test_adapter_in_use_stays_in_use(backends):
    shared, _ = backends("plain")
    for seed, name in enumerate(NAMES[:2]):
        shared.use_adapter(UseAdapterRequest(name=name, seed=seed))
    weights = {name: parameter.detach().clone() for name, parameter in shared.policy.named_parameters()}
    in_one_call(shared, {"": random_piece(0, num_microbatches=1)})
    now = dict(shared.policy.named_parameters())
    assert all((now[name] == tensor).all() for name, tensor in weights.items())
    assert all(parameter.grad is None for parameter in now.values())


def test_wrong_version_is_refused(backends):
    shared, _ = backends("plain")
    shared.use_adapter(UseAdapterRequest(name="a", seed=0))
    with pytest.raises(ContractError, match="weight_version 3"):
        in_one_call(shared, {"a": evolve(random_piece(0, num_microbatches=1), weight_version=3)})


def test_trainer_of_whole_weights_has_no_adapters(tmp_path):
    make_model(tmp_path, "qwen3", tied=True, num_layers=1, alphabet=ALPHABET)
    whole = Fsdp2Backend(evolve(lora_context(tmp_path), lora=None), make_config())
    with pytest.raises(ContractError, match="whole weights"):
        in_one_call(whole, {"": random_piece(0, num_microbatches=1)})


def test_passes_are_filled_in_order():
    """Each microbatch goes into the first pass that has room, and is of its temperature; a larger one goes by itself."""
    piece = random_piece(0, num_microbatches=1)
    pieces = {"a": piece, "b": piece, "hot": evolve(piece, temperature=2.0), "plain": evolve(piece, loss=LIKELIHOOD)}
    sizes = {("a", 0): 6, ("a", 1): 3, ("b", 0): 4, ("b", 1): 20, ("hot", 0): 1, ("plain", 0): 1, ("plain", 1): 2}
    assert planned(pieces, sizes, 10) == [
        [("a", 0), ("a", 1)],
        [("b", 0)],
        [("b", 1)],
        [("hot", 0)],
        [("plain", 0), ("plain", 1)],
    ]
    assert len(planned(pieces, sizes, None)) == 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The faults of each layout of two ranks, on each of them."""
    root = tmp_path_factory.mktemp("ranks")
    for family in ("qwen3", "qwen3_moe"):
        make_model(root / "models" / family, family, tied=family == "qwen3", num_layers=2, alphabet=ALPHABET)
    return launch_rows(run_all, (2, root), [results_file(root, 2, rank) for rank in range(2)])


@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_ranks_together_equal_ranks_by_turns(layout, ranks):
    found = [result[layout] for result in ranks if result[layout]]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("dtype", "sizes", "expected"),
    [
        (torch.float32, (4, 12), True),
        (torch.float32, (2, 12), False),
        (torch.bfloat16, (8, 16), True),
        (torch.bfloat16, (4, 16), False),
        (torch.float64, (8, 16), False),
    ],
)
def test_grouped_products_need_rows_of_16_bytes(dtype: torch.dtype, sizes: tuple[int, ...], expected: bool) -> None:
    assert has_grouped_products(torch.device("cpu"), dtype, sizes) is expected


def test_grouped_products_are_those_of_each_group() -> None:
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(shape, generator=generator).requires_grad_() for shape in [(1, 9, 8), (3, 4, 8), (3, 12, 4)])
    rows = [2, 0, 7]
    product = grouped_low_rank(x, a, b, torch.tensor(rows).cumsum(0).int())
    expected = torch.cat([low_rank(*own) for own in zip(x.split(rows, -2), a, b, strict=True)], -2)
    torch.testing.assert_close(product, expected)
    weight = torch.randn(expected.shape, generator=generator)
    found, wanted = (torch.autograd.grad((one * weight).sum(), (x, a, b)) for one in (product, expected))
    torch.testing.assert_close(found, wanted)
    assert grouped_low_rank(x.double(), a, b, torch.tensor([9])) is None
