"""The trainer's handle counts the pieces of a step, makes whole steps of them, and keeps those of adapters apart."""

import attrs
import numpy as np
import pytest

from rlcore.spi import (
    BoundError,
    ContractError,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    LoadStateRequest,
    LoraSpec,
    LossSpec,
    NonFiniteError,
    OptimStepRequest,
    OptimStepResult,
    PluginError,
    SetResidencyRequest,
    TrainStepRequest,
    UseAdapterRequest,
    UseAdapterResult,
    capabilities,
)

LOSS = LossSpec(path="rlcore.testing.fakes.algorithm:fake_likelihood", config=None, token_columns=())


def piece_of(batch, piece=0, version=0, **changes):
    counts = batch.counts()
    request = ForwardBackwardRequest(
        microbatches=(batch,), counts=counts, loss=LOSS, temperature=1.0, weight_version=version, piece=piece, logprobs=False
    )
    return attrs.evolve(request, **changes)


def step_of(batch, **changes):
    request = TrainStepRequest(microbatches=(batch,), counts=batch.counts(), loss=LOSS, temperature=1.0, weight_version=0)
    return attrs.evolve(request, **changes)


def end(pieces, version=0, **settings):
    return OptimStepRequest(pieces=pieces, weight_version=version, **settings)


def test_pieces_are_counted(make_trainer, batch):
    trainer = make_trainer()
    trainer.forward_backward(piece_of(batch))
    trainer.forward_backward(piece_of(batch, 1))
    for wrong in (1, 3):
        with pytest.raises(ContractError, match=f"optim_step found .* 2 pieces .* {wrong}"):
            trainer.optim_step(end(wrong))
        with pytest.raises(ContractError, match="forward_backward found .* 2 pieces"):
            trainer.forward_backward(piece_of(batch, wrong))
    assert trainer.optim_step(end(2)).weight_version == 1
    assert trainer.weight_version == 1
    with pytest.raises(ContractError, match="0 pieces"):
        trainer.optim_step(end(2, 1))
    with pytest.raises(ContractError, match="one piece or more"):
        trainer.optim_step(end(0, 1))


def drop_by_step(trainer, batch):
    trainer.train_step(step_of(batch))
    return 1


def drop_by_move(trainer, batch):
    trainer.set_residency(SetResidencyRequest(weights="device", state="device"))
    return 0


def drop_by_load(trainer, batch):
    trainer.load_state(LoadStateRequest(directory="there"))
    return 7


@pytest.mark.parametrize("drop", [drop_by_step, drop_by_move, drop_by_load])
def test_gradients_do_not_outlive(make_trainer, batch, drop):
    trainer = make_trainer()
    trainer.forward_backward(piece_of(batch))
    version = drop(trainer, batch)
    with pytest.raises(ContractError, match="0 pieces"):
        trainer.optim_step(end(1, version))


def test_a_piece_that_fails_drops_all(make_trainer, batch):
    answers = iter([ForwardBackwardResult(loss=0.5, weight_version=0), NonFiniteError("the loss is nan")])

    def forward_backward(self, request):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    trainer = make_trainer(forward_backward=forward_backward)
    trainer.forward_backward(piece_of(batch))
    with pytest.raises(NonFiniteError):
        trainer.forward_backward(piece_of(batch, 1))
    assert trainer.is_usable
    with pytest.raises(ContractError, match="0 pieces"):
        trainer.optim_step(end(1))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"learning_rate": -1.0}, "learning_rate: found -1.0"),
        ({"eps": -1.0}, "eps: found -1.0"),
        ({"weight_decay": -1.0}, "weight_decay: found -1.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"betas": (0.9, 1.0)}, r"betas: found \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, r"betas: found \(0.9,\)"),
    ],
)
def test_settings_that_no_step_can_have_are_refused(make_trainer, batch, settings, text):
    trainer = make_trainer()
    trainer.forward_backward(piece_of(batch))
    with pytest.raises((ContractError, NonFiniteError), match=text):
        trainer.optim_step(end(1, **settings))
    assert trainer.optim_step(end(1)).weight_version == 1


@pytest.mark.parametrize(
    ("hook", "answer"),
    [
        ("forward_backward", ForwardBackwardResult(loss=0.5, weight_version=1)),
        ("forward_backward", ForwardBackwardResult(loss=0.5, weight_version=0, logprobs=(np.zeros(2, np.float32),))),
        ("optim_step", OptimStepResult(weight_version=0, grad_norm=1.0, learning_rate=0.1)),
        ("optim_step", OptimStepResult(weight_version=1, grad_norm=-1.0, learning_rate=0.1)),
    ],
)
def test_wrong_answers_fail_the_trainer(make_trainer, batch, hook, answer):
    trainer = make_trainer(**{hook: lambda self, request: answer})
    with pytest.raises(ContractError):
        trainer.forward_backward(piece_of(batch))
        trainer.optim_step(end(1))
    assert not trainer.is_usable


def test_a_step_is_made_of_the_two_halves(make_trainer, batch):
    trainer = make_trainer(train_step=None)
    result = trainer.train_step(step_of(batch, logprobs=True, gradient_norms=True))
    assert (result.weight_version, result.loss, result.grad_norm, result.metrics) == (1, 0.5, 1.0, {"kl": 0.1})
    assert [array.shape for array in result.logprobs] == [(batch.num_tokens,)]
    assert result.gradient_norms == {"a": 0.6, "b": 0.8}
    with pytest.raises(BoundError) as raised:
        trainer.train_step(step_of(batch, weight_version=1, schedule_step=1, bounds={"kl": 0.05}))
    assert raised.value.metrics == {"kl": 0.1}
    assert trainer.weight_version == 1
    with pytest.raises(ContractError, match="0 pieces"):
        trainer.optim_step(end(1, 1))


def test_norms_of_pieces_need_the_capability(make_trainer, batch):
    trainer = make_trainer(declared=capabilities.KNOWN - {capabilities.GRADIENT_NORMS})
    trainer.forward_backward(piece_of(batch))
    with pytest.raises(ContractError, match="this optim_step needs the capability 'gradient_norms'"):
        trainer.optim_step(end(1, gradient_norms=True))
    assert trainer.optim_step(end(1)).gradient_norms is None


def test_a_trainer_with_neither_is_refused(make_trainer):
    with pytest.raises(PluginError, match="train_step: missing"):
        make_trainer(train_step=None, forward_backward=None, declared=capabilities.KNOWN - {capabilities.SPLIT_STEP})


def test_pieces_and_versions_are_an_adapters_own(make_trainer, batch):
    versions = {}
    trainer = make_trainer(
        use_adapter=lambda self, request: UseAdapterResult(
            weight_version=0 if request.seed is not None else versions[request.name]
        )
    )
    trainer.forward_backward(piece_of(batch))
    trainer.use_adapter(UseAdapterRequest(name="b", seed=1))
    with pytest.raises(ContractError, match="0 pieces"):
        trainer.optim_step(end(1))
    trainer.train_step(step_of(batch))
    versions[""], versions["b"] = 0, 1
    trainer.use_adapter(UseAdapterRequest(name=""))
    assert trainer.weight_version == 0
    trainer.optim_step(end(1))
    trainer.use_adapter(UseAdapterRequest(name="b"))
    assert trainer.weight_version == 1
    versions["b"] = 5
    with pytest.raises(ContractError, match="weight_version: found 5; expected 1"):
        trainer.use_adapter(UseAdapterRequest(name="b"))


@pytest.mark.parametrize("request_", [UseAdapterRequest(name="c"), UseAdapterRequest(name="", drops=("c",))])
def test_adapters_that_are_not_there(make_trainer, request_):
    with pytest.raises(ContractError, match="no adapter 'c'"):
        make_trainer().use_adapter(request_)


@pytest.mark.parametrize(
    ("rank", "seed", "init_from", "accepted"),
    [
        (1, 1, None, True),
        (4, 1, None, True),
        (None, 1, "d", True),
        (4, 1, "d", True),
        (0, 1, None, False),
        (5, 1, None, False),
        (True, 1, None, False),
        (2, None, None, False),
        (2, 1, "d", False),
    ],
)
def test_ranks_of_adapters(make_trainer, rank, seed, init_from, accepted):
    trainer = make_trainer(lora=LoraSpec(rank=4, init_from=init_from))
    request = UseAdapterRequest(name="" if seed is None else "b", seed=seed, rank=rank)
    if accepted:
        assert trainer.use_adapter(request).weight_version == 0
        return
    with pytest.raises(ContractError, match="rank"):
        trainer.use_adapter(request)
