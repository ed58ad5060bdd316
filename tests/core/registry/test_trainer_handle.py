"""The trainer's handle: legality before each call, and every check of what a backend returns."""

import math

import attrs
import numpy as np
import pytest

from rlcore.spi import (
    BoundError,
    ContractError,
    ExportWeightsRequest,
    GlobalCounts,
    LogprobsRequest,
    LogprobsResult,
    LossSpec,
    NonFiniteError,
    SaveStateRequest,
    SetResidencyRequest,
    TokenBatch,
    TrainStepRequest,
    TrainStepResult,
    ValuesRequest,
    ValuesResult,
    capabilities,
)

LOSS = LossSpec(path="rlcore.testing.fakes.algorithm:fake_likelihood", config=None, token_columns=())
GOOD = TrainStepResult(weight_version=1, loss=0.5, grad_norm=1.0, learning_rate=1e-3)


def step_request(batch, version=0, **changes):
    request = TrainStepRequest(microbatches=(batch,), counts=batch.counts(), loss=LOSS, temperature=1.0, weight_version=version)
    return attrs.evolve(request, **changes)


def logprobs_request(*batches, entropy=False, version=0, **changes):
    request = LogprobsRequest(microbatches=batches, model="policy", temperature=1.0, entropy=entropy, weight_version=version)
    return attrs.evolve(request, **changes)


def column(batch, value=-1.0):
    result = np.full(batch.num_tokens, value, np.float32)
    result[batch.offsets[:-1]] = 0.0
    return result


def test_a_good_step_returns_what_the_backend_returned_and_moves_the_version(make_trainer, batch):
    trainer = make_trainer()
    assert trainer.weight_version is None
    assert trainer.train_step(step_request(batch)).metrics == {"kl": 0.1}
    assert trainer.weight_version == 1
    assert trainer.layout.data_parallel_size == 1


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        (None, ContractError, "found None; expected a TrainStepResult"),
        ({"loss": 1.0}, ContractError, "found a dict; expected a TrainStepResult"),
        (attrs.evolve(GOOD, weight_version=0), ContractError, "weight_version: found 0; expected 1"),
        (attrs.evolve(GOOD, weight_version=True), ContractError, "weight_version: found a bool; expected an int"),
        (attrs.evolve(GOOD, weight_version=np.int64(1)), ContractError, "weight_version: found an int64"),
        (attrs.evolve(GOOD, loss=math.nan), NonFiniteError, "loss: found nan"),
        (attrs.evolve(GOOD, loss=np.zeros(())), ContractError, "loss: found a ndarray; expected a float"),
        (attrs.evolve(GOOD, grad_norm=math.inf), NonFiniteError, "grad_norm: found inf"),
        (attrs.evolve(GOOD, grad_norm=-1.0), ContractError, "grad_norm: found -1.0; expected at least 0"),
        (attrs.evolve(GOOD, learning_rate=None), ContractError, "learning_rate: found None"),
        (attrs.evolve(GOOD, metrics=None), ContractError, "metrics: found None; expected a mapping"),
        (attrs.evolve(GOOD, metrics={"kl": math.nan}), NonFiniteError, "metrics['kl']: found nan"),
        (attrs.evolve(GOOD, metrics={3: 1.0}), ContractError, "metrics: found the key 3; expected a string"),
    ],
)
def test_a_wrong_step_result_is_refused_and_fails_the_trainer(make_trainer, batch, returned, error, text):
    trainer = make_trainer(train_step=lambda self, request: returned)
    with pytest.raises(error) as raised:
        trainer.train_step(step_request(batch))
    assert str(raised.value) == f"trainer 'fake' (in-process 0): train_step returned what it must not: {raised.value.__cause__}"
    assert text in str(raised.value)
    with pytest.raises(ContractError, match="get_logprobs after .* train_step"):
        trainer.get_logprobs(logprobs_request(batch))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"microbatches": ()}, "at least one microbatch"),
        ({"microbatches": None}, "a tuple of at least one microbatch"),
        ({"microbatches": ("text",)}, "found a str; expected a TokenBatch"),
        ({"temperature": 0.0}, "a positive temperature; found 0.0"),
        (
            {"loss": attrs.evolve(LOSS, token_columns=("advantages",))},
            "microbatch 0 lacks advantages, which the loss rlcore.testing.fakes.algorithm:fake_likelihood reads",
        ),
    ],
)
def test_a_wrong_step_request_never_reaches_the_backend(make_trainer, batch, changes, text):
    calls = []
    trainer = make_trainer(train_step=lambda self, request: calls.append(request))
    with pytest.raises(ContractError, match=text):
        trainer.train_step(step_request(batch, **changes))
    assert calls == []


def test_another_records_request_never_reaches_the_backend(make_trainer, batch):
    with pytest.raises(ContractError, match="train_step takes a TrainStepRequest; found a LogprobsRequest"):
        make_trainer().train_step(logprobs_request(batch))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "nowhere.at_all:loss",
            "the loss 'nowhere.at_all:loss', which the algorithm names, cannot be imported: ModuleNotFoundError: No module",
        ),
        ("rlcore.testing.fakes.algorithm:nothing", "has no attribute 'nothing'"),
        ("rlcore.spi.batch:ADVANTAGES", "which the algorithm names, is a str; expected a function"),
    ],
)
def test_a_loss_that_is_not_there_is_the_algorithms_and_never_reaches_the_backend(make_trainer, batch, path, text):
    trainer = make_trainer()
    with pytest.raises(ContractError) as raised:
        trainer.train_step(step_request(batch, loss=attrs.evolve(LOSS, path=path)))
    assert text in str(raised.value)
    assert trainer.weight_version is None
    trainer.train_step(step_request(batch))


def test_previous_logprobs_are_there_where_they_are_declared(make_trainer, batch):
    given = attrs.evolve(LOSS, previous_logprobs="given")
    with pytest.raises(ContractError, match="microbatch 0 lacks previous_logprobs"):
        make_trainer().train_step(step_request(batch, loss=given))
    carried = batch.with_token_column("previous_logprobs", np.zeros(batch.num_tokens, np.float32))
    assert make_trainer().train_step(step_request(carried, loss=given)).weight_version == 1
    assert (
        make_trainer().train_step(step_request(batch, loss=attrs.evolve(LOSS, previous_logprobs="unchanged"))).weight_version
        == 1
    )


COMPARED = attrs.evolve(LOSS, generation_mismatch=True)


def test_the_generators_logprobs_are_there_where_they_are_compared_with(make_trainer, batch):
    with pytest.raises(ContractError, match="microbatch 0 lacks generation_logprobs"):
        make_trainer().train_step(step_request(batch, loss=COMPARED))


@pytest.mark.parametrize(
    ("loss", "metrics", "text"),
    [
        (COMPARED, {"importance_ratio": 1.0}, "metrics: found no generation_kl_error, token_mult_prob_error; expected them"),
        (LOSS, {"token_mult_prob_error": 1.0}, "metrics: found 'token_mult_prob_error', which the loop writes itself"),
    ],
)
def test_the_mismatch_is_reported_where_it_is_asked_for_alone(make_trainer, batch, loss, metrics, text):
    carrying = batch.with_token_column("generation_logprobs", np.zeros(batch.num_tokens, np.float32))
    trainer = make_trainer(train_step=lambda self, request: attrs.evolve(GOOD, metrics=metrics))
    with pytest.raises(ContractError, match=text):
        trainer.train_step(step_request(carrying, loss=loss))


@pytest.mark.parametrize(
    ("capability", "changes"),
    [
        (capabilities.PREVIOUS_LOGPROBS, {"loss": attrs.evolve(LOSS, previous_logprobs="unchanged")}),
        (capabilities.STEP_LOGPROBS, {"logprobs": True}),
        (capabilities.GRADIENT_NORMS, {"gradient_norms": True}),
        (capabilities.SCHEDULE_STEP, {"schedule_step": 3}),
    ],
)
def test_what_a_request_says_more_needs_its_capability(make_trainer, batch, capability, changes):
    trainer = make_trainer(declared=capabilities.KNOWN - {capability})
    with pytest.raises(ContractError, match=f"this train_step needs the capability '{capability}'"):
        trainer.train_step(attrs.evolve(step_request(batch), **changes))


@pytest.mark.parametrize(
    ("asked", "norms", "error"),
    [
        (True, None, "gradient_norms: found None"),
        (True, {"a": float("nan")}, r"gradient_norms\['a'\]: found nan"),
        (True, {1: 1.0}, "gradient_norms: found the key 1"),
        (False, {"a": 1.0}, "gradient_norms: found some"),
    ],
)
def test_norms_come_where_they_are_asked_for_alone(make_trainer, batch, asked, norms, error):
    trainer = make_trainer(train_step=lambda self, request: attrs.evolve(GOOD, gradient_norms=norms))
    with pytest.raises((ContractError, NonFiniteError), match=error):
        trainer.train_step(attrs.evolve(step_request(batch), gradient_norms=asked))


def test_every_capability_that_a_request_lacks_is_named(make_trainer, batch):
    trainer = make_trainer(declared=capabilities.KNOWN - {capabilities.SCHEDULE_STEP, capabilities.STEP_LOGPROBS})
    with pytest.raises(ContractError) as raised:
        trainer.train_step(attrs.evolve(step_request(batch), schedule_step=3, logprobs=True))
    assert {repr(name) in str(raised.value) for name in (capabilities.SCHEDULE_STEP, capabilities.STEP_LOGPROBS)} == {True}


def test_versions_are_followed_through_steps(make_trainer, batch):
    trainer = make_trainer()
    trainer.train_step(step_request(batch, version=0))
    with pytest.raises(ContractError, match="train_step at weight version 0; .* 1"):
        trainer.train_step(step_request(batch, version=0))
    with pytest.raises(ContractError, match="get_logprobs at weight version 2; .* 1"):
        trainer.get_logprobs(logprobs_request(batch, version=2))
    with pytest.raises(ContractError, match="export_weights at weight version 0; .* 1"):
        trainer.export_weights(ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=99))
    assert trainer.train_step(step_request(batch, version=1)).weight_version == 2


@pytest.mark.parametrize(
    "error", [NonFiniteError("the loss is nan"), ContractError("wrong version"), BoundError("the kl is 0.2", {"kl": 0.2})]
)
def test_a_step_that_the_trainer_refuses_leaves_it_usable(make_trainer, batch, error):
    answers = iter([error, GOOD])

    def train_step(self, request):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    trainer = make_trainer(train_step=train_step)
    with pytest.raises(type(error)) as raised:
        trainer.train_step(step_request(batch))
    assert raised.value is error
    assert raised.value.__notes__ == ["raised in train_step of trainer 'fake' (in-process 0)"]
    assert trainer.train_step(step_request(batch)).weight_version == 1


def test_bounds_need_the_capability(make_trainer, batch):
    calls = []
    declared = capabilities.KNOWN - {capabilities.METRIC_BOUNDS}
    trainer = make_trainer(declared=declared, train_step=lambda self, request: calls.append(request) or GOOD)
    with pytest.raises(ContractError, match="this train_step needs the capability 'metric_bounds'"):
        trainer.train_step(step_request(batch, bounds={"kl": 1.0}))
    assert calls == []
    assert trainer.train_step(step_request(batch)).weight_version == 1


def test_bounds_that_the_trainer_ignores_fail_it(make_trainer, batch):
    trainer = make_trainer()
    trainer.train_step(step_request(batch, bounds={"kl": 0.1, "absent": 0.0}))
    with pytest.raises(ContractError, match=r"metrics\['kl'\]: found 0.1, above .* 0.05"):
        trainer.train_step(step_request(batch, version=1, bounds={"kl": 0.05}))
    assert not trainer.is_usable


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_step_that_breaks_off_fails_the_trainer(make_trainer, batch, error):
    def train_step(self, request):
        raise error

    trainer = make_trainer(train_step=train_step)
    with pytest.raises(type(error)) as raised:
        trainer.train_step(step_request(batch))
    assert raised.value is error
    with pytest.raises(ContractError, match="train_step after it failed in train_step"):
        trainer.train_step(step_request(batch))
    trainer.close()


def test_logprobs_come_back_as_they_were_given(make_trainer, batch):
    result = make_trainer().get_logprobs(logprobs_request(batch, batch, entropy=True))
    assert [array.tolist() for array in result.logprobs] == [[0, -1, -1, 0, -1]] * 2
    assert [array.tolist() for array in result.entropy] == [[0, 1, 1, 0, 1]] * 2


def answering(batch, **changes):
    """get_logprobs that answers for one microbatch, some fields of its result replaced."""
    good = LogprobsResult(logprobs=(column(batch),), entropy=None, weight_version=0)
    return lambda self, request: attrs.evolve(good, **changes)


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return (array,)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda c: {"logprobs": None}, ContractError, "logprobs: found None; expected a tuple of arrays"),
        (lambda c: {"logprobs": [c]}, ContractError, "logprobs: found a list; expected a tuple"),
        (lambda c: {"logprobs": (c, c)}, ContractError, "found 2 arrays; expected one for each of 1 microbatches"),
        (lambda c: {"logprobs": (c[:-1],)}, ContractError, "found shape [4] of float32; expected [5] of float32"),
        (lambda c: {"logprobs": (c.astype(np.float64),)}, ContractError, "of float64; expected [5] of float32"),
        (lambda c: {"logprobs": (c[None],)}, ContractError, "found shape [1, 5]"),
        (lambda c: {"logprobs": (c.tolist(),)}, ContractError, "found list; expected a numpy array"),
        (lambda c: {"logprobs": changed(c, 2, np.nan)}, NonFiniteError, "of microbatch 0: found nan at token 2"),
        (lambda c: {"logprobs": changed(c, 4, -np.inf)}, NonFiniteError, "found -inf at token 4"),
        (lambda c: {"logprobs": changed(c, 1, 0.01)}, ContractError, "at token 1; expected at most 0.0001"),
        (lambda c: {"logprobs": changed(c, 3, -2.0)}, ContractError, "found -2.0 at the first token of sequence 1"),
        (lambda c: {"weight_version": 1}, ContractError, "weight_version: found 1; expected 0"),
        (lambda c: {"entropy": (-c,)}, ContractError, "entropy: found arrays; expected None"),
    ],
)
def test_wrong_logprobs_are_refused_and_the_trainer_stays_usable(make_trainer, batch, change, error, text):
    trainer = make_trainer(get_logprobs=answering(batch, **change(column(batch))))
    with pytest.raises(error) as raised:
        trainer.get_logprobs(logprobs_request(batch))
    assert text in str(raised.value)
    assert trainer.train_step(step_request(batch)).weight_version == 1


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda c: {"entropy": None}, ContractError, "entropy: found None; expected a tuple of arrays"),
        (lambda c: {"entropy": (c,)}, ContractError, "at token 1; expected at least -0.0001"),
        (lambda c: {"entropy": changed(-c, 1, np.inf)}, NonFiniteError, "found inf at token 1"),
        (lambda c: {"entropy": changed(-c, 0, 1.0)}, ContractError, "found 1.0 at the first token of sequence 0"),
    ],
)
def test_wrong_entropy_is_refused(make_trainer, batch, change, error, text):
    trainer = make_trainer(get_logprobs=answering(batch, **change(column(batch))))
    with pytest.raises(error) as raised:
        trainer.get_logprobs(logprobs_request(batch, entropy=True))
    assert text in str(raised.value)


def test_rounding_is_tolerated(make_trainer, batch):
    rounded = {"logprobs": changed(column(batch), 1, 5e-5), "entropy": changed(column(batch, 1.0), 1, -5e-5)}
    result = make_trainer(get_logprobs=answering(batch, **rounded)).get_logprobs(logprobs_request(batch, entropy=True))
    assert result.logprobs[0][1] == np.float32(5e-5)


def test_calls_that_need_an_undeclared_capability_are_refused(make_trainer, batch, tmp_path):
    trainer = make_trainer(declared=())
    calls = {
        capabilities.REFERENCE_POLICY: lambda: trainer.get_logprobs(logprobs_request(batch, model="reference")),
        capabilities.ENTROPY: lambda: trainer.get_logprobs(logprobs_request(batch, entropy=True)),
        capabilities.RESIDENCY: lambda: trainer.set_residency(SetResidencyRequest(weights="host", state="device")),
    }
    for capability, call in calls.items():
        with pytest.raises(ContractError, match=f"'{capability}'"):
            call()
    with pytest.raises(ContractError, match="'entropy'"):
        trainer.train_step(step_request(batch, loss=attrs.evolve(LOSS, entropy="metric")))
    assert trainer.set_residency(SetResidencyRequest(weights="device", state="device")).device_bytes == 0
    assert trainer.has(capabilities.ENTROPY) is False


def values_request(*batches):
    return ValuesRequest(microbatches=batches, weight_version=0)


def test_values_come_back_as_they_were_given_at_first_tokens_too(make_trainer, batch):
    result = make_trainer(head="value").get_values(values_request(batch, batch))
    assert [array.tolist() for array in result.values] == [[0.25] * 5] * 2


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda c: {"values": None}, ContractError, "values: found None; expected a tuple of arrays"),
        (lambda c: {"values": (c[:-1],)}, ContractError, "found shape [4] of float32; expected [5] of float32"),
        (lambda c: {"values": changed(c, 0, np.nan)}, NonFiniteError, "of microbatch 0: found nan at token 0"),
        (lambda c: {"weight_version": 1}, ContractError, "weight_version: found 1; expected 0"),
    ],
)
def test_wrong_values_are_refused_and_the_trainer_stays_usable(make_trainer, batch, change, error, text):
    good = ValuesResult(values=(column(batch),), weight_version=0)
    trainer = make_trainer(head="value", get_values=lambda self, request: attrs.evolve(good, **change(column(batch))))
    with pytest.raises(error) as raised:
        trainer.get_values(values_request(batch))
    assert text in str(raised.value)
    assert trainer.is_usable


def test_a_reference_alone_is_asked_for_nothing_else(make_trainer, batch, tmp_path):
    trainer = make_trainer(needs_policy=False)
    for call in (
        lambda: trainer.get_logprobs(logprobs_request(batch, model="policy")),
        lambda: trainer.train_step(step_request(batch)),
        lambda: trainer.save_state(SaveStateRequest(directory=tmp_path, kind="resume")),
    ):
        with pytest.raises(ContractError, match="built without a policy"):
            call()
    assert trainer.get_logprobs(logprobs_request(batch, model="reference")).weight_version == 0
    trainer.set_residency(SetResidencyRequest(weights="host", state="host"))
    trainer.close()


def test_each_head_answers_for_itself_alone(make_trainer, batch):
    with pytest.raises(ContractError, match='get_values .* head "tokens"'):
        make_trainer().get_values(values_request(batch))
    trainer = make_trainer(head="value")
    with pytest.raises(ContractError, match='get_logprobs .* head "value"'):
        trainer.get_logprobs(logprobs_request(batch))
    routed = batch.with_token_column("routed_experts", np.zeros((5, 1, 1), np.int16))
    for call in (
        lambda: trainer.get_values(values_request(routed)),
        lambda: trainer.train_step(step_request(batch, logprobs=True)),
        *(
            lambda changes=changes: trainer.train_step(step_request(batch, loss=attrs.evolve(LOSS, **changes)))
            for changes in ({"entropy": "metric"}, {"previous_logprobs": "unchanged"}, {"generation_mismatch": True})
        ),
    ):
        with pytest.raises(ContractError, match="no distribution over tokens"):
            call()
    assert trainer.train_step(step_request(batch)).weight_version == 1


def residency(weights, state):
    return SetResidencyRequest(weights=weights, state=state)


def test_what_is_on_the_host_cannot_be_used(make_trainer, batch):
    trainer = make_trainer()
    trainer.set_residency(residency("device", "host"))
    with pytest.raises(ContractError, match="train_step needs .*: state; call set_residency"):
        trainer.train_step(step_request(batch))
    assert trainer.get_logprobs(logprobs_request(batch)).weight_version == 0
    trainer.set_residency(residency("host", "host"))
    with pytest.raises(ContractError, match="train_step needs .*: weights and state;"):
        trainer.train_step(step_request(batch))
    with pytest.raises(ContractError, match="get_logprobs needs .*: weights"):
        trainer.get_logprobs(logprobs_request(batch))
    with pytest.raises(ContractError, match="export_weights needs .*: weights"):
        trainer.export_weights(ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=99))
    trainer.set_residency(residency("device", "device"))
    assert trainer.train_step(step_request(batch)).weight_version == 1


@pytest.mark.own_process
def test_the_checks_of_a_step_make_as_many_calls_however_large_it_is(make_trainer, count_calls):
    def batch_of(num_sequences, length):
        total = num_sequences * length
        mask = np.ones(total, np.bool_)
        mask[::length] = False
        offsets = np.arange(0, total + 1, length, dtype=np.int64)
        return TokenBatch(tokens=np.ones(total, np.int32), offsets=offsets, loss_mask=mask)

    def calls(batch):
        logprobs = column(batch)
        trainer = make_trainer(
            get_logprobs=lambda self, request: LogprobsResult(logprobs=(logprobs,), entropy=(-logprobs,), weight_version=0)
        )
        request = logprobs_request(batch, entropy=True)
        trainer.get_logprobs(request)
        return count_calls(lambda: trainer.get_logprobs(request))

    num_sequences, length = 512, 400
    large = batch_of(num_sequences, length)
    assert calls(large) == calls(batch_of(2, 4))
    total = num_sequences * length
    assert large.counts() == GlobalCounts(num_loss_tokens=total - num_sequences, num_loss_sequences=num_sequences)
