"""When the trainer normalises over what the generator had kept, and what is said where one of them cannot."""

import pytest
from attrs import evolve

from rlcore.config.model import ModelConfig
from rlcore.config.plugin_choice import NamedPluginChoice
from rlcore.config.recipe import Recipe, RolloutConfig
from rlcore.run.plan.algorithm_rules import mask_needs, replays_sampling_mask
from rlcore.spi import AlgorithmNeeds


@pytest.fixture
def minimal_recipe() -> Recipe:
    return Recipe(model=ModelConfig(path="none"), algorithm=NamedPluginChoice(name="fake"))


@pytest.mark.parametrize(
    ("options", "compares", "expected"),
    [
        ({"top_p": 0.9}, True, True),
        ({"top_k": 5}, True, True),
        ({"top_p": 0.9}, False, False),
        ({}, True, False),
        ({"top_p": 0.9, "accept_truncation_bias": True}, True, False),
    ],
)
def test_a_mask_is_replayed_where_truncated_probabilities_are_compared(
    minimal_recipe: Recipe, options: dict[str, float], compares: bool, expected: bool
) -> None:
    recipe = evolve(minimal_recipe, rollout=RolloutConfig(**options))  # type: ignore[arg-type]
    needs = AlgorithmNeeds(source="rollouts", untruncated_sampling=compares)
    assert replays_sampling_mask(recipe, needs) == expected


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"top_p": 0.9}, "rollout.top_p = 0.9, and"),
        ({"top_k": 5}, "rollout.top_k = 5, and"),
        ({"top_k": 5, "top_p": 0.5}, "rollout.top_k = 5 and rollout.top_p = 0.5, and"),
    ],
)
def test_the_reason_names_the_keys_and_what_may_be_done(minimal_recipe: Recipe, options: dict[str, float], keys: str) -> None:
    recipe = evolve(minimal_recipe, rollout=RolloutConfig(**options))  # type: ignore[arg-type]
    (reason,) = mask_needs(recipe, "sampling_mask").values()
    assert reason.startswith(keys)
    assert reason.endswith("rollout.accept_truncation_bias = true")
