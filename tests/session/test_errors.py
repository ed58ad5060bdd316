"""Each wrong call gives the one error that says what to do, and leaves the session as it was."""

import numpy as np
import pytest

from rlcore.execution import InProcessTrainer
from rlcore.spi import GlobalCounts, LossOutput, LossSpec, NonFiniteError
from rlcore_session import CallError, Datum

SIX = [1, 2, 3, 4, 5, 6]
ADVANTAGES = {"advantages": [0.0, 1, 1, 1, 1, 1]}


def broken(inputs, config):
    """A loss that is infinite."""
    return LossOutput(loss=inputs.logprobs.sum() * float("inf"))


TRAINING = {
    "an unknown name": (([Datum(SIX)], "cross_entropi"), {}, "loss: found 'cross_entropi'; did you mean 'cross_entropy'"),
    "a path without a function": (([Datum(SIX)], "rlcore_session:nothing"), {}, "loss: found .*nothing"),
    "no loss at all": (([Datum(SIX)], 3), {}, "loss: found a int"),
    "a missing column": (([Datum(SIX, None, ADVANTAGES)], "clipped"), {}, "expected 'generation_logprobs' too"),
    "a column of some": (([Datum(SIX, None, ADVANTAGES), Datum(SIX)], "clipped"), {}, r"data\[1\].columns\['advantages'\]"),
    "a short column": (([Datum(SIX, None, {"weights": [1.0]})],), {}, r"shape \[1\].*expected \[6\]"),
    "a column of texts": (([Datum(SIX, None, {"weights": list("abcdef")})],), {}, "expected \\[6\\] of numbers"),
    "a NaN": (([Datum(SIX, None, {"weights": [0, np.nan, 0, 0, 0, 0]})],), {}, "nan at token 1; expected finite"),
    "an odd sequence column": (([Datum(SIX, None, {}, {"margins": "x"})],), {}, "sequence_columns.*found 'x'"),
    "a long sequence": (([Datum([1] * 13)],), {}, r"data\[0\].tokens: found 13 tokens; expected at most 12"),
    "an unknown token": (([Datum([1, 99])],), {}, r"data\[0\].tokens: found the token 99; expected ids from 0 to"),
    "a negative token": (([Datum([1, -1])],), {}, "found the token -1"),
    "no tokens": (([Datum([])],), {}, r"data\[0\].tokens: found no tokens"),
    "tokens as text": (([Datum("abc")],), {}, r"data\[0\].tokens: found 'abc'"),
    "tokens of no shape": (([Datum([[1, 2], [3]])],), {}, r"data\[0\].tokens: found \[\[1, 2\], \[3\]\]"),
    "a column of no shape": (
        ([Datum([1, 2], None, {"weights": [[1], [1, 2]]})],),
        {},
        r"columns\['weights'\]: found shape \[\]",
    ),
    "a column of two shapes": (
        ([Datum([1, 2], None, {"x": np.ones((2, 2))}), Datum([1, 2], None, {"x": np.ones((2, 3))})],),
        {},
        r"data.columns\['x'\]: found shapes \[2\], \[3\]",
    ),
    "a large integer": (
        ([Datum([1, 2], None, {"weights": [0, 2**32]})],),
        {},
        "4294967296 at token 1; expected integers of int32",
    ),
    "a large number": (([Datum([1, 2], None, {"weights": [0, 1e39]})],), {}, r"1e\+39 at token 1; expected finite numbers"),
    "a large sequence column": (([Datum([1, 2], None, {}, {"x": 2**32})],), {}, r"sequence_columns\['x'\]: found 4294967296"),
    "one datum": ((Datum(SIX),), {}, "data: found a Datum; expected a list of Datum"),
    "counts as a number": (([Datum(SIX)],), {"counts": 5}, "counts: found 5; expected a GlobalCounts"),
    "counts of nothing": (([Datum(SIX)],), {"counts": GlobalCounts(num_loss_tokens=0, num_loss_sequences=1)}, "counts: found"),
    "a mask at the first token": (([Datum(SIX, [True] * 6)],), {}, r"data\[0\].loss_mask: found True at the first token"),
    "a mask of another length": (([Datum(SIX, [False])],), {}, r"data\[0\].loss_mask: found shape \[1\]"),
    "a mask of nothing": (([Datum(SIX, [False] * 6)],), {}, "data: found no token that takes part in the loss"),
    "no data": (([],), {}, "data: found a list of nothing"),
    "lists in place of data": (([SIX],), {}, "data: found a list of list; expected a list of Datum"),
    "a temperature of 0": (([Datum(SIX)],), {"temperature": 0}, "temperature: found 0"),
    "a temperature of almost 0": (([Datum(SIX)],), {"temperature": 1e-300}, "temperature: found 1e-300"),
    "options of cross_entropy": (([Datum(SIX)],), {"config": {"x": 1}}, "takes no options"),
    "an unknown option": (([Datum(SIX, None, ADVANTAGES)], "clipped"), {"config": {"clip_lo": 1}}, "config.clip_lo"),
    "the objective as an option": (([Datum(SIX)], "clipped"), {"config": {"objective": "cispo"}}, "no such key"),
    "options of a function": (([Datum(SIX)], lambda given: given), {"config": {}}, "the loss is a function"),
    "too few derivatives": (([Datum(SIX)], lambda _: []), {}, r"expected a list of arrays \[6\]"),
    "no derivatives": (([Datum(SIX)], lambda _: 1.0), {}, "loss: found a float returned"),
    "an infinite derivative": (([Datum(SIX)], lambda _: [np.full(6, np.inf)]), {}, "the derivative inf returned"),
    "a derivative outside the mask": (([Datum(SIX)], lambda _: [np.ones(6)]), {}, "loss_mask is False"),
}
SAMPLING = {
    "one prompt": (("1+2=",), {}, "prompts: found a str.*Write a single prompt as"),
    "no prompt": (([],), {}, "prompts: found an empty list"),
    "a number": (([5],), {}, r"prompts\[0\]: found a int"),
    "an empty prompt": (([[]],), {}, r"prompts\[0\]: found no token"),
    "an unknown token": (([[99]],), {}, r"prompts\[0\]: found the token 99"),
    "a long prompt": (([[1] * 12],), {}, r"prompts\[0\]: found 12 tokens, and 1 to follow; expected at most 12"),
    "much to follow": (([[1] * 8],), {"max_tokens": 5}, "found 8 tokens, and 5 to follow"),
    "no samples": ((["1"],), {"num_samples": 0}, "num_samples: found 0"),
    "a negative temperature": ((["1"],), {"temperature": -1.0}, "temperature: found -1.0"),
    "a temperature of almost 0": ((["1"],), {"temperature": 1e-300}, "temperature: found 1e-300"),
    "a stop token beyond int32": ((["1"],), {"stop_token_ids": [2**31]}, r"stop_token_ids: found \[2147483648\]"),
    "top_p of 0": ((["1"],), {"top_p": 0}, "top_p: found 0"),
    "a seed in words": ((["1"],), {"seed": "a"}, "seed: found 'a'"),
    "no stop": ((["1"],), {"stop": None}, "stop: found None"),
    "a prompt of no shape": (([[[1, 2], [3]]],), {}, r"prompts\[0\]: found a list"),
    "an empty stop": ((["1"],), {"stop": [""]}, "stop: found"),
}


@pytest.mark.parametrize(("arguments", "options", "text"), TRAINING.values(), ids=TRAINING)
def test_wrong_data_or_loss(shared, arguments, options, text):
    with pytest.raises(CallError, match=text):
        shared.forward_backward(*arguments, **options)


@pytest.mark.parametrize(("arguments", "options", "text"), SAMPLING.values(), ids=SAMPLING)
def test_wrong_prompts_or_options(shared, arguments, options, text):
    with pytest.raises(CallError, match=text):
        shared.sample(*arguments, **options)


OTHERS = {
    "optim_step without gradients": (lambda session, _: session.optim_step(), "optim_step: found no gradients"),
    "a negative rate": (lambda session, _: session.optim_step(learning_rate=-1.0), "learning_rate: found -1.0"),
    "an eps of 0": (lambda session, _: session.optim_step(eps=0.0), "eps: found 0.0; expected .*at least 1.17549e-38"),
    "a decay beyond float32": (lambda session, _: session.optim_step(weight_decay=1e39), "weight_decay: found 1e\\+39"),
    "one beta": (lambda session, _: session.optim_step(betas=(0.9,)), "betas: found .*two numbers"),
    "an unknown model": (lambda session, _: session.logprobs([SIX], model="teacher"), "model: found 'teacher'"),
    "no reference": (lambda session, _: session.logprobs([SIX], model="reference"), "reference=True"),
    "no sequences": (lambda session, _: session.logprobs([]), "sequences: found"),
    "an unknown export": (lambda session, path: session.export(path / "a", kind="gguf"), "kind: found 'gguf'"),
    "adapters of none": (
        lambda session, path: session.export(path / "a", kind="peft"),
        r"kind: found \"peft\", without a \[lora\]",
    ),
    "an export over files": (lambda session, path: session.export(path.parent), "directory: found .*, which is there"),
}


@pytest.mark.parametrize(("call", "text"), OTHERS.values(), ids=OTHERS)
def test_other_wrong_calls(shared, tmp_path, call, text):
    with pytest.raises(CallError, match=text):
        call(shared, tmp_path)


def test_all_problems_at_once(shared):
    with pytest.raises(CallError) as error:
        shared.forward_backward([Datum([1, 99]), Datum([1] * 13, [True] * 13)])
    assert [problem.path for problem in error.value.problems] == ["data[0].tokens", "data[1].tokens", "data[1].loss_mask"]


def test_wrong_calls_leave_gradients_and_errors_of_the_trainer_drop_them(opened):
    session = opened()
    session.forward_backward([Datum(SIX)])
    for wrong in ("cross_entropi", lambda _: 1 / 0):
        with pytest.raises((CallError, ZeroDivisionError)):
            session.forward_backward([Datum(SIX)], wrong)
    assert session.optim_step().weight_version == 1
    before = session.logprobs([SIX])[0]
    session.forward_backward([Datum(SIX)])
    with pytest.raises(NonFiniteError):
        session.forward_backward([Datum(SIX)], LossSpec(path=f"{__name__}:broken", config=None))
    with pytest.raises(CallError, match="NonFiniteError"):
        session.optim_step()
    np.testing.assert_array_equal(session.logprobs([SIX])[0], before)
    session.forward_backward([Datum(SIX)])
    assert session.optim_step().weight_version == 2


def test_numbers_of_numpy_are_numbers(opened):
    session = opened()
    [samples] = session.sample(
        ["1+"], num_samples=np.int64(2), temperature=np.float32(0.5), top_k=np.int32(3), seed=np.int64(1)
    )
    assert len(samples) == 2
    session.forward_backward([Datum(SIX)], temperature=np.float32(0.5))
    update = session.optim_step(learning_rate=np.float32(0.25), betas=(np.float32(0.5), np.float64(0.5)))
    assert update.learning_rate == 0.25


def test_function_whose_log_probabilities_fail_drops_gradients(opened, monkeypatch):
    session = opened()
    session.forward_backward([Datum(SIX)])

    def fails(*_):
        raise NonFiniteError("a log-probability is NaN")

    with monkeypatch.context() as patch:
        patch.setattr(InProcessTrainer, "logprobs", fails)
        with pytest.raises(NonFiniteError):
            session.forward_backward([Datum(SIX)], lambda _: [np.zeros(6)])
    with pytest.raises(CallError, match="NonFiniteError.*1 call"):
        session.optim_step()


def test_run_is_not_saved_over(opened, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(CallError, match="which holds a run"):
        opened().save(tmp_path)


def test_closed_session(opened):
    session = opened()
    session.close()
    session.close()
    for call in (lambda: session.sample(["1"]), lambda: session.logprobs([SIX]), session.optim_step, session.sync):
        with pytest.raises(CallError, match="session: "):
            call()
