"""Losses and columns of algorithms: what no run could train with is refused before anything is allocated."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.config.load import raw_from
from rlcore.run.plan.batch_check import batch_problems
from rlcore.run.plan.choice import choose_plugins
from rlcore.run.plan.sections import convert_recipe
from rlcore.spi import ConfigError, LossSpec
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.algorithm import FakeAlgorithm

LOSS = "rlcore.testing.fakes.algorithm:fake_policy_gradient"
LOSSES = """
from rlcore.spi import GENERATION_LOGPROBS
OWN = "own"

def sound(inputs, config):
    if config.reference:
        return inputs.token_columns["only_now_and_then"]
    return inputs.token_columns["never_surely"]

def undeclared(inputs, config):
    weights = inputs.token_columns[OWN] * 2
    return weights

def declared(inputs, config):
    return inputs.token_columns["advantages"] * inputs.token_columns[GENERATION_LOGPROBS]

def of_sequences(inputs, config):
    return inputs.sequence_columns["lengths_wanted"].sum()
"""


def algorithm(change: Callable[[Any, Any], Any]) -> type:
    """The fake one with another training batch: `change(rollouts, batch)`."""

    class Changed(FakeAlgorithm):
        def build_batch(self, rollouts):
            return change(rollouts, super().build_batch(rollouts))

    return Changed


def naming(path: str, *columns: str) -> Callable[[Any, Any], Any]:
    """A batch whose loss is another one."""
    return lambda rollouts, made: evolve(
        made, loss=evolve(made.loss, path=path, token_columns=columns or made.loss.token_columns)
    )


@pytest.fixture
def losses(tmp_path, monkeypatch) -> None:
    """A module of losses that is not imported yet."""
    (tmp_path / "acme_losses.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(tmp_path)


WRONG = {
    "no path": (naming("nowhere"), "whose loss is 'nowhere'"),
    "no module": (
        naming("nowhere.at_all:loss"),
        "whose loss is 'nowhere.at_all:loss', but there is no module 'nowhere'",
    ),
    "no function": (naming("acme_losses:declarde"), "but acme_losses has no 'declarde'; did you mean 'declared'?"),
    "no function of ours": (naming(f"{LOSS}s"), "has no 'fake_policy_gradients'; did you mean 'fake_policy_gradient'?"),
    "asked for": (naming(LOSS, "advantagez"), f"whose loss {LOSS!r} reads the token column 'advantagez', which nobody brings"),
    "not asked for": (naming("acme_losses:undeclared"), "reads the token column 'own', which it does not ask for"),
    "of sequences": (naming("acme_losses:of_sequences"), "reads the sequence column 'lengths_wanted', which nobody brings"),
    "token column of samples": (
        lambda rollouts, made: rollouts.batch.token_columns["valuez"],
        "which reads the token column 'valuez', which nobody brings",
    ),
    "sequence column of samples": (
        lambda rollouts, made: rollouts.batch.sequence_columns["margins"],
        "which reads the sequence column 'margins', which nobody brings",
    ),
}


@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG)
def test_what_no_run_could_train_with(
    change: Any, text: str, losses: None, prepared: Callable[..., Any], registry_with: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("algorithm.fake.generation_ratio=true", registry=registry_with(algorithm=algorithm(change)))
    (problem,) = raised.value.problems
    assert problem.path == "algorithm.name"
    assert problem.found.startswith('"fake" (in-process 0), wh')
    assert text in problem.found
    assert problem.remedy.startswith("It is a fault of the plugin")


def raising(rollouts: Any, made: Any) -> Any:
    raise ZeroDivisionError


SOUND = {
    "as it is": lambda rollouts, made: made,
    "raises of these samples": raising,
    "another KeyError": lambda rollouts, made: {}["x"],
    "declared": naming("acme_losses:declared", "advantages", "generation_logprobs"),
    "maybe": naming("acme_losses:sound", "advantages"),
    "own column": lambda rollouts, made: evolve(
        made,
        batch=made.batch.with_token_column("own", np.zeros(made.batch.num_tokens, np.float32)),
        loss=LossSpec(path="acme_losses:undeclared", config=None, token_columns=("own",)),
    ),
}


@pytest.mark.parametrize("change", SOUND.values(), ids=SOUND)
def test_what_a_run_may_yet_train_with(
    change: Any, losses: None, prepared: Callable[..., Any], registry_with: Callable[..., Any]
) -> None:
    prepared(registry=registry_with(algorithm=algorithm(change)))
    assert "acme_losses" not in sys.modules


@pytest.mark.parametrize(
    "options",
    [
        {"kl_coefficient": 0.1, "previous_logprobs": True},
        {"critic": True},
        {"source": "demonstrations"},
        {"source": "demonstrations", "head": "value"},
        {"source": "preferences", "kl_coefficient": 0.1},
    ],
)
def test_each_kind_of_samples_has_the_columns_of_a_run(options: dict[str, Any]) -> None:
    tables = {"model": {"path": "none"}, "environment": {"name": "fake"}, "algorithm": {"name": "fake", "fake": options}}
    recipe, registry = convert_recipe(raw_from(tables, (), "a test"), fake_registry())
    assert list(batch_problems(choose_plugins(recipe, registry, "cpu"))) == []


def test_a_module_that_is_imported_is_asked_itself(
    monkeypatch, prepared: Callable[..., Any], registry_with: Callable[..., Any]
) -> None:
    module = ModuleType("acme_made")
    module.loss = len
    monkeypatch.setitem(sys.modules, "acme_made", module)
    prepared(registry=registry_with(algorithm=algorithm(naming("acme_made:loss"))))
    with pytest.raises(ConfigError, match="acme_made has no 'lost'"):
        prepared(registry=registry_with(algorithm=algorithm(naming("acme_made:lost"))))
