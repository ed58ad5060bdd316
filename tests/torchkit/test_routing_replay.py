"""A router's choice replaced by the one given, and how far the two agree."""

import numpy as np
import pytest
import torch

from rlcore.spi import ROUTED_EXPERTS, ContractError, TokenBatch
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.layers.routing_replay import ReplayedChoice, RoutingReplay, check_routing

CPU = torch.device("cpu")
OWN = torch.tensor([[0, 1], [2, 3], [1, 3]])
GIVEN = torch.tensor([[1, 0], [2, 0], [-1, 3]])
"""The first row names the router's experts in another order, the second one of its two; the third is left to it."""


def routed(experts: object) -> TokenBatch:
    """A batch of two tokens with these experts int16 [2, layers, K]; None for none."""
    batch = TokenBatch(tokens=np.zeros(2, np.int32), offsets=np.array([0, 2]), loss_mask=np.array([False, True]))
    return batch if experts is None else batch.with_token_column(ROUTED_EXPERTS, np.asarray(experts, np.int16))


def test_tokens_go_where_they_are_told_and_others_where_the_router_sends_them() -> None:
    choice = ReplayedChoice()
    assert choice.choose(OWN) is OWN
    assert choice.alike is None
    choice.targets = GIVEN
    assert choice.choose(OWN).tolist() == [[1, 0], [2, 0], [1, 3]]
    assert choice.alike.tolist() == [3.0, 4.0]
    choice.targets = OWN
    choice.choose(OWN)
    assert choice.alike.tolist() == [9.0, 10.0], "added to those of the microbatch before"


def test_the_agreement_is_that_of_all_routers_in_one_step() -> None:
    choices = [ReplayedChoice(), ReplayedChoice(), ReplayedChoice()]
    choices[0].targets, choices[1].targets = GIVEN, OWN
    for choice in choices:
        choice.choose(OWN)
    replay = RoutingReplay(choices)
    given = [routed(np.zeros((2, 2, 2)))]
    assert replay.metrics(given, CPU, 1) == {"routing_agreement": (3 + 6) / (4 + 6)}
    assert replay.metrics([routed(None)], CPU, 1) == {}
    replay.begin()
    assert replay.metrics(given, CPU, 1) == {}, "no router has been given a choice since"
    choices[1].choose(OWN)
    assert replay.metrics(given, CPU, 1) == {"routing_agreement": 1.0}


@pytest.fixture
def dims() -> ModelDims:
    """Of a mixture of 2 layers with 4 experts, of which a token goes to 2."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "vocab_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "moe_intermediate_size": 4}
    return ModelDims.of(sizes | {"num_experts": 4, "num_experts_per_tok": 2})


def test_a_routing_of_the_models_own_form_passes(dims: ModelDims) -> None:
    check_routing([routed(None), routed(None)], dims)
    check_routing([routed(np.full((2, 2, 2), 3)), routed(np.full((2, 2, 2), -1))], dims)


@pytest.mark.parametrize(
    ("experts", "found"),
    [
        ([np.zeros((2, 2, 2)), None], "found in 1 of 2 microbatches"),
        ([np.zeros((2, 3, 2))], r"found \[2, 3, 2\] with experts up to 0; expected \[T, 2, 2\] of the model's 4 experts"),
        ([np.zeros((2, 2, 1))], r"found \[2, 2, 1\] with"),
        ([np.full((2, 2, 2), 4)], r"found \[2, 2, 2\] with experts up to 4"),
    ],
)
def test_any_other_routing_is_refused(experts: list[object], found: str, dims: ModelDims) -> None:
    with pytest.raises(ContractError, match=f"{ROUTED_EXPERTS}: {found}"):
        check_routing([routed(one) for one in experts], dims)
