"""Groups of a policy, of adapters and of a critic, and state that another optimizer left."""

import pytest
from attrs import evolve
from fsdp2_support import OPTIMIZER, exported, make_batch, make_config, make_context, step_request

from rlcore.spi import (
    CheckpointError,
    CloseRequest,
    ConfigError,
    LoadStateRequest,
    LoraSpec,
    LossOutput,
    LossSpec,
    OptimizerGroup,
    SaveStateRequest,
)
from rlcore_fsdp2.backend import Fsdp2Backend
from rlcore_torchkit.optimizer import settings

VALUES = LossSpec(path="test_optimizer_groups:sum_of_values", config=None)


def sum_of_values(inputs, config):
    return LossOutput(loss=inputs.values.sum() / inputs.counts.num_loss_tokens)


HALVED = evolve(OPTIMIZER, groups=(OptimizerGroup(parameters=("*.lora_B.weight",), learning_rate=OPTIMIZER.learning_rate / 2),))


@pytest.fixture
def opened(model_directory):
    """A function of the fields of a context: an open trainer."""
    made = []

    def make(**fields):
        made.append(Fsdp2Backend(evolve(make_context(model_directory()), **fields), make_config()))
        return made[-1]

    yield make
    for one in made:
        one.close(CloseRequest())


def adapters_after_a_step(trainer):
    batch = make_batch()
    before = {name: p.detach().clone() for name, p in trainer.policy.named_parameters() if p.requires_grad}
    trainer.train_step(step_request([batch], batch.counts()))
    return {name: trainer.policy.get_parameter(name).detach() - value for name, value in before.items()}


def test_group_of_adapters_has_its_rate(opened):
    """B begins at zero: without decay its first step is a sign times the rate."""
    plain = adapters_after_a_step(opened(lora=LoraSpec(rank=4)))
    halved = adapters_after_a_step(opened(lora=LoraSpec(rank=4), optimizer=HALVED))
    largest = {name: (halved[name].abs().max() / plain[name].abs().max()).item() for name in plain if "lora_B" in name}
    assert largest
    assert all(share == pytest.approx(0.5, rel=1e-3) for share in largest.values())


def test_pattern_of_adapters_matches_nothing_without_them(opened):
    with pytest.raises(ConfigError) as caught:
        opened(optimizer=HALVED)
    assert [problem.path for problem in caught.value.problems] == ["optimizer.groups[0].parameters"]


def test_critics_head_is_a_tensor_of_groups_and_no_matrix(opened):
    groups = (OptimizerGroup(parameters=("score.weight",), learning_rate=0.1),)
    trainer = opened(head="value", optimizer=evolve(OPTIMIZER, name="muon", weight_decay=0.0, groups=groups))
    batch = make_batch()
    request = step_request([batch], batch.counts(), loss=VALUES)
    before = exported(trainer)
    trainer.train_step(request)
    moved = {name: (tensor - before[name]).abs().max().item() for name, tensor in exported(trainer, 1).items()}
    assert moved["score.weight"] == pytest.approx(0.1, rel=0.01)
    assert moved["model.embed_tokens.weight"] == 0.0  # a head at zero passes no gradient on


@pytest.mark.parametrize(("before", "after"), [("adamw", "muon"), ("muon", "adamw"), ("adamw", "8bit"), ("8bit", "adamw")])
def test_state_of_another_optimizer_is_refused(opened, monkeypatch, tmp_path, before, after):
    monkeypatch.setattr(settings, "LEAST_8BIT", 256)
    kinds = {"adamw": {}, "muon": {"name": "muon"}, "8bit": {"moments": "8bit"}}
    first, batch = opened(optimizer=evolve(OPTIMIZER, **kinds[before])), make_batch()
    first.train_step(step_request([batch], batch.counts()))
    (tmp_path / "saved").mkdir()
    first.save_state(SaveStateRequest(directory=tmp_path / "saved", kind="resume"))
    other = opened(optimizer=evolve(OPTIMIZER, **kinds[after]))
    weights = exported(other)
    with pytest.raises(CheckpointError, match=r"\[optimizer\]"):
        other.load_state(LoadStateRequest(directory=tmp_path / "saved"))
    assert all((exported(other)[name] == value).all() for name, value in weights.items())
