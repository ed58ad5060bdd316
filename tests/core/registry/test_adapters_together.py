"""The trainer's handle counts the pieces of several adapters, and goes through those of a trainer without the hook by turns."""

import attrs
import pytest

from rlcore.spi import (
    ContractError,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    ForwardBackwardTogetherRequest,
    ForwardBackwardTogetherResult,
    LossSpec,
    NonFiniteError,
    OptimStepRequest,
    UseAdapterRequest,
    UseAdapterResult,
    capabilities,
)

LOSS = LossSpec(path="rlcore.testing.fakes.algorithm:fake_likelihood", config=None, token_columns=())
BY_TURNS = capabilities.KNOWN - {capabilities.AGENT, capabilities.ADAPTERS_TOGETHER}


def piece_of(batch, piece=0, version=0, **changes):
    request = ForwardBackwardRequest(
        microbatches=(batch,),
        counts=batch.counts(),
        loss=LOSS,
        temperature=1.0,
        weight_version=version,
        piece=piece,
        logprobs=False,
    )
    return attrs.evolve(request, **changes)


def together(**pieces):
    return ForwardBackwardTogetherRequest(pieces={name.removesuffix("_"): one for name, one in pieces.items()})


def use(self, request):
    """The version of an adapter that was begun is 0: no update is made in between."""
    self.calls.append(f"use_adapter {request.name}")
    return UseAdapterResult(weight_version=0)


def begun(make_trainer, **options):
    """A trainer that has the adapters "", "a" and "b", the last of them in use."""
    trainer = make_trainer(use_adapter=use, **options)
    for name in "ab":
        trainer.use_adapter(UseAdapterRequest(name=name, seed=1))
    return trainer


KINDS = pytest.mark.parametrize("options", [{}, {"declared": BY_TURNS}], ids=["together", "by turns"])


@KINDS
def test_each_adapter_has_its_pieces_counted(make_trainer, batch, options):
    trainer = begun(make_trainer, **options)
    trainer.forward_backward(piece_of(batch))
    answer = trainer.forward_backward_together(together(b=piece_of(batch, 1), a=piece_of(batch)))
    assert [*answer.pieces] == ["b", "a"]
    assert trainer.optim_step(OptimStepRequest(pieces=2, weight_version=0)).weight_version == 1
    trainer.use_adapter(UseAdapterRequest(name="a"))
    assert trainer.optim_step(OptimStepRequest(pieces=1, weight_version=0)).weight_version == 1


def test_adapters_without_the_hook_take_turns(make_trainer, batch):
    calls = []

    def turn(self, request):
        calls.append(request.name)
        return UseAdapterResult(weight_version=0)

    trainer = make_trainer(use_adapter=turn, declared=BY_TURNS, forward_backward_together=None)
    trainer.use_adapter(UseAdapterRequest(name="a", seed=1))
    trainer.forward_backward_together(together(_=piece_of(batch), a=piece_of(batch)))
    assert calls == ["a", "", "a", "a"]
    with pytest.raises(ContractError, match="forward_backward_together.*adapters \\(\\)"):
        trainer.forward_backward_together(together())


@KINDS
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight_version": 2}, "weight version 2; it holds 0"),
        ({"piece": 1}, "0 pieces"),
        ({"microbatches": ()}, "at least one microbatch"),
        ({"temperature": 0.0}, "positive temperature"),
    ],
)
def test_requests_that_do_not_fit_an_adapter(make_trainer, batch, options, changes, text):
    trainer = begun(make_trainer, **options)
    with pytest.raises(ContractError, match=text):
        trainer.forward_backward_together(together(b=piece_of(batch), a=piece_of(batch, **changes)))
    assert trainer.weight_version == 0
    trainer.forward_backward(piece_of(batch))


def test_adapters_that_are_not_there(make_trainer, batch):
    with pytest.raises(ContractError, match="'c'.*'a', 'b'"):
        begun(make_trainer).forward_backward_together(together(c=piece_of(batch)))


def test_failure_together_keeps_the_counts(make_trainer, batch):
    def fail(self, request):
        raise NonFiniteError("the loss is nan")

    trainer = begun(make_trainer, forward_backward_together=fail)
    trainer.forward_backward(piece_of(batch))
    with pytest.raises(NonFiniteError):
        trainer.forward_backward_together(together(b=piece_of(batch, 1), a=piece_of(batch)))
    trainer.forward_backward(piece_of(batch, 1))
    trainer.optim_step(OptimStepRequest(pieces=2, weight_version=0))


def test_failure_by_turns_drops_the_gradients_of_all(make_trainer, batch):
    answers = [ForwardBackwardResult(loss=0.5, weight_version=0)] * 2

    def answer(self, request):
        if not answers:
            raise NonFiniteError("the loss is nan")
        return answers.pop()

    trainer = begun(make_trainer, declared=BY_TURNS, forward_backward=answer)
    trainer.forward_backward(piece_of(batch))
    with pytest.raises(NonFiniteError):
        trainer.forward_backward_together(together(b=piece_of(batch, 1), a=piece_of(batch)))
    assert trainer.is_usable
    for name in "ab":
        trainer.use_adapter(UseAdapterRequest(name=name))
        with pytest.raises(ContractError, match="0 pieces"):
            trainer.optim_step(OptimStepRequest(pieces=1, weight_version=0))


@pytest.mark.parametrize("names", [["b", "a"], ["a"]])
def test_wrong_answers_fail_the_trainer(make_trainer, batch, names):
    result = ForwardBackwardResult(loss=0.5, weight_version=0)
    answer = ForwardBackwardTogetherResult(pieces=dict.fromkeys(names, result))
    trainer = begun(make_trainer, forward_backward_together=lambda self, request: answer)
    with pytest.raises(ContractError, match="pieces: found"):
        trainer.forward_backward_together(together(a=piece_of(batch), b=piece_of(batch)))
    assert not trainer.is_usable
