"""Several adapters in one engine: their numbers and versions, and slots that a refit of another leaves to the bit."""

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from safetensors.torch import load_file

from rlcore.spi import ContractError, LoraSpec, RefitError, RefitRequest, SetResidencyRequest
from rlcore_conformance.generators.generator_adapters import random_adapters
from rlcore_conformance.references.tensors import make_export
from rlcore_vllm.backend import VllmBackend
from rlcore_vllm.channels.manifest import AdapterPlace
from rlcore_vllm.refit.held_adapters import HeldAdapters

from .conftest import CONFIG, TwoModels, request_of

LORA = LoraSpec(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
WEIGHTS = {"model.norm.weight": np.ones(2, np.float32)}
ADAPTER = {"a.lora_A.weight": np.ones((1, 2), np.float32), "a.lora_B.weight": np.ones((2, 1), np.float32)}


def request(content: Any, version: int, adapter: str = "", drops: tuple[str, ...] = ()) -> RefitRequest:
    return RefitRequest(
        weight_version=version,
        channel="in_process",
        weights=make_export(content, version),
        may_alias=False,
        adapter=adapter,
        drops=drops,
    )


def test_numbers_of_adapters_and_what_stays_beside_them() -> None:
    held = HeldAdapters()
    rows = [
        (request({**WEIGHTS, **ADAPTER}, 4), AdapterPlace(number=1)),
        (request(ADAPTER, 0, "one"), AdapterPlace(number=2, kept={1: 4})),
        (request(ADAPTER, 5), AdapterPlace(number=1, kept={2: 0})),
        # Not in the number of the one that is dropped, by which unfinished samples would go on.
        (request(ADAPTER, 0, "two", ("",)), AdapterPlace(number=3, kept={2: 0})),
        (request(ADAPTER, 1, "new"), AdapterPlace(number=1, kept={2: 0, 3: 0})),
        (request({**WEIGHTS, **ADAPTER}, 9, "other"), AdapterPlace(number=4)),
        (request({**WEIGHTS, **ADAPTER}, 10, "other"), AdapterPlace(number=4)),
    ]
    for one, expected in rows:
        place = held.place(one, of_adapters=True)
        assert place == expected
        held = held.after(one, place)
        assert held.versions[held.numbers[one.adapter]] == one.weight_version
    assert (dict(held.numbers), dict(held.versions)) == ({"other": 4}, {4: 10})
    held = HeldAdapters().after(request(WEIGHTS, 3), held.place(request(WEIGHTS, 3), of_adapters=False))
    assert (dict(held.numbers), dict(held.versions)) == ({"": 0}, {0: 3})


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (HeldAdapters(), "found no weights; expected version 2 of 'one'"),
        (HeldAdapters(numbers={"": 0}, versions={0: 2}), "found version 2; expected version 2 of 'one'"),
        (HeldAdapters(numbers={"": 1, "one": 2}, versions={1: 2, 2: 0}), "found version 2, version 0 of 'one'; expected"),
    ],
)
def test_what_is_not_held_is_named(held: HeldAdapters, text: str) -> None:
    with pytest.raises(ContractError, match=text):
        held.require(2, "one")


@pytest.fixture(scope="module")
def backend(two_models: TwoModels, open_backends: list[VllmBackend]) -> VllmBackend:
    """An engine with room for three adapters."""
    open_backends.append(VllmBackend(two_models.context(lora=LORA, max_adapters=3), CONFIG))
    return open_backends[0]


@pytest.fixture(scope="module")
def contents(two_models: TwoModels) -> dict[str, Any]:
    """The model's weights, by "weights", and four adapters by name."""
    weights = load_file(two_models.directories[0] / "model.safetensors")
    names = ("", "one", "two", "new")
    return {"weights": weights} | {name: random_adapters(weights, LORA, seed, 0.1) for seed, name in enumerate(names)}


def hold(backend: VllmBackend, contents: dict[str, Any]) -> None:
    backend.refit(request({**contents["weights"], **contents[""]}, 0))
    for name in ("one", "two"):
        backend.refit(request(contents[name], 0, name))


def test_a_refit_writes_to_the_slot_of_its_adapter_alone(backend: VllmBackend, contents: dict[str, Any]) -> None:
    hold(backend, contents)
    before = {name: backend.held_digests(name) for name in ("", "one", "two")}
    model = backend.held_digests()
    assert len({str(digests) for digests in before.values()}) == 3
    backend.refit(request(contents["new"], 7, "one"))
    assert backend.held_digests("one") != before["one"]
    backend.refit(request(contents["one"], 8, "new", ("one",)))
    assert backend.held_digests("new") == before["one"]
    for name in ("", "two"):
        assert backend.held_digests(name) == before[name], "another adapter's slot has changed"
    assert backend.held_digests() == model, "the weights below have changed"


def test_an_adapter_that_changes_on_the_way_costs_all(backend: VllmBackend, contents: dict[str, Any]) -> None:
    """Nothing of the engine counts then, until the model's weights come again."""
    hold(backend, contents)
    wrong = request(contents["new"], 7, "one")
    buckets = [
        evolve(bucket, tensors=tuple(evolve(one, digest=one.digest ^ 1) for one in bucket.tensors))
        for bucket in wrong.weights.buckets
    ]
    with pytest.raises(RefitError, match="lora"):
        backend.refit(evolve(wrong, weights=evolve(wrong.weights, buckets=iter(buckets))))
    for name in ("", "one", "two"):
        with pytest.raises(ContractError, match="no weights"):
            backend.generate(evolve(request_of([3], 1), adapter=name))
    with pytest.raises(RefitError, match="adapters alone"):
        backend.refit(request(contents["two"], 0, "two"))
    hold(backend, contents)
    assert len(backend.generate(evolve(request_of([3], 1), adapter="two")).tokens) == 8


def test_discarded_weights_cost_all_adapters_and_others_none(backend: VllmBackend, contents: dict[str, Any]) -> None:
    hold(backend, contents)
    asked = evolve(request_of([3, 5], 2), adapter="two")
    before = backend.generate(asked)
    awake = SetResidencyRequest(weights="device", state="device")
    backend.set_residency(SetResidencyRequest(weights="host", state="host"))
    backend.set_residency(awake)
    np.testing.assert_array_equal(backend.generate(asked).tokens, before.tokens)
    backend.set_residency(SetResidencyRequest(weights="host", state="host", discard_weights=True))
    backend.set_residency(awake)
    with pytest.raises(ContractError, match="no weights"):
        backend.generate(asked)
