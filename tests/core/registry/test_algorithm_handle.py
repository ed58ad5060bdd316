"""The algorithm's handle: what an algorithm may return, and what becomes of its mistakes before anything is trained on."""

import math
import sys

import attrs
import numpy as np
import pytest

from rlcore.registry.binding import build_algorithm
from rlcore.registry.checks import OWN_METRICS, OWN_PREFIXES
from rlcore.registry.discovery import Registry
from rlcore.registry.plugin_errors import owner_of
from rlcore.spi import (
    GENERATION_LOGPROBS,
    GROUP_IDS,
    AlgorithmContext,
    AlgorithmNeeds,
    ContractError,
    DataError,
    LossSpec,
    NonFiniteError,
    PluginError,
    RolloutBatch,
    SamplingMask,
    TokenBatch,
    TrainingBatch,
    TurnRewards,
)

NEEDS = AlgorithmNeeds(source="rollouts")
LOSS = LossSpec(path="rlcore.testing.fakes.algorithm:fake_likelihood", config=None)
BATCH = TokenBatch(
    tokens=np.arange(4, dtype=np.int32),
    offsets=np.asarray([0, 2, 4], np.int64),
    loss_mask=np.asarray([False, True] * 2),
    sequence_columns={"group_ids": np.zeros(2, np.int32)},
)
ROLLOUTS = RolloutBatch(
    batch=BATCH,
    rewards=np.asarray([1.0, 0.0], np.float32),
    valid=np.ones(2, np.bool_),
    finish_reasons=np.zeros(2, np.uint8),
)
GOOD = TrainingBatch(batch=BATCH, loss=LOSS, metrics={"advantage_max": 1.0})


LABEL = "algorithm 'acme' (in-process 0)"
CONTEXT = AlgorithmContext(
    seed=0, samples_per_prompt=2, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=True
)


@pytest.fixture
def make_algorithm(backends, make_provider):
    """An algorithm that needs and returns what is given; a function is called with the rollouts."""

    def make(returned=GOOD, needs=NEEDS, vocab_size=10):
        class Algorithm:
            def __init__(self, context, config):
                self.needs = needs

            def build_batch(self, rollouts):
                return returned(rollouts) if callable(returned) else returned

        backends.Algorithm = Algorithm
        provider = make_provider("acme", backend="fake_backends:Algorithm", capabilities=())
        (entry,) = Registry.from_providers({"algorithm": [provider]}).of("algorithm")
        handle = build_algorithm(entry, CONTEXT, provider.config())
        handle.vocab_size = vocab_size
        return handle

    return make


def test_what_is_right_passes_as_it_is(make_algorithm):
    algorithm = make_algorithm()
    assert algorithm.build_batch(ROLLOUTS) is GOOD
    assert algorithm.needs is NEEDS


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        (None, ContractError, "found None; expected a TrainingBatch"),
        (BATCH, ContractError, "found a TokenBatch; expected a TrainingBatch"),
        (attrs.evolve(GOOD, batch=None), ContractError, "batch: found a NoneType; expected a TokenBatch"),
        (attrs.evolve(GOOD, loss=None), ContractError, "loss: found a NoneType; expected a LossSpec"),
        (attrs.evolve(GOOD, loss=attrs.evolve(LOSS, path="loss")), ContractError, "loss.path: found 'loss'; expected 'package"),
        (
            attrs.evolve(GOOD, loss=attrs.evolve(LOSS, path="nowhere.at_all:loss")),
            ContractError,
            "loss.path: found 'nowhere.at_all:loss', but there is no module 'nowhere'; expected 'package",
        ),
        (
            attrs.evolve(GOOD, batch=BATCH.with_token_column("advantages", np.asarray([0, math.nan, 0, 0], np.float32))),
            NonFiniteError,
            "batch.token_columns['advantages']: found nan at token 1; expected finite numbers",
        ),
        (
            attrs.evolve(GOOD, batch=attrs.evolve(BATCH, sequence_columns={"weight": np.asarray([1, math.inf])})),
            NonFiniteError,
            "batch.sequence_columns['weight']: found inf at token 1",
        ),
        (
            attrs.evolve(GOOD, batch=attrs.evolve(BATCH, tokens=np.asarray([0, 9, 10, 3], np.int32))),
            ContractError,
            "batch.tokens: found 10 at token 2; expected at most 9",
        ),
        (
            attrs.evolve(GOOD, loss=attrs.evolve(LOSS, token_columns="advantages")),
            ContractError,
            "loss.token_columns: found 'advantages'; expected a tuple of names",
        ),
        (
            attrs.evolve(GOOD, loss=attrs.evolve(LOSS, entropy="metrics")),
            ContractError,
            "loss.entropy: found 'metrics'; expected one of 'none', 'metric', 'loss'",
        ),
        (attrs.evolve(GOOD, metrics=None), ContractError, "metrics: found None; expected a mapping"),
        (attrs.evolve(GOOD, metrics={"a": np.float32(1)}), ContractError, "metrics['a']: found"),
        (attrs.evolve(GOOD, metrics={"a": "b"}), ContractError, "metrics['a']: found"),
        (attrs.evolve(GOOD, metrics={"a": math.nan}), NonFiniteError, "metrics['a']: found nan; expected a finite number"),
        (attrs.evolve(GOOD, metrics={"step": 7.0}), ContractError, "metrics: found 'step', which the loop writes itself"),
        (attrs.evolve(GOOD, metrics={"time/x": 7.0}), ContractError, "metrics: found 'time/x', which the loop writes itself"),
        (attrs.evolve(GOOD, no_signal=True), ContractError, "no_signal: found True; expected the reason in words, or None"),
        (attrs.evolve(GOOD, no_signal=""), ContractError, "no_signal: found ''; expected the reason in words, or None"),
    ],
)
def test_what_must_not_be_returned_names_plugin_and_function(make_algorithm, returned, error, text):
    with pytest.raises(error) as raised:
        make_algorithm(returned).build_batch(ROLLOUTS)
    assert str(raised.value).startswith(f"{LABEL}: build_batch returned what it must not: ")
    assert text in str(raised.value)


def test_tokens_that_come_to_it_beyond_the_vocabulary_are_not_its_mistake(make_algorithm):
    with pytest.raises(DataError, match="token 3 .* below 3,") as raised:
        make_algorithm(vocab_size=3).build_batch(ROLLOUTS)
    assert LABEL not in str(raised.value)


def test_tokens_that_were_sampled_beyond_the_vocabulary_are_the_generators(make_algorithm):
    columns = {**ROLLOUTS.batch.token_columns, GENERATION_LOGPROBS: np.zeros(ROLLOUTS.batch.num_tokens, np.float32)}
    greatest = int(ROLLOUTS.batch.tokens[ROLLOUTS.batch.loss_mask].max())
    rollouts = attrs.evolve(ROLLOUTS, batch=attrs.evolve(ROLLOUTS.batch, token_columns=columns))
    with pytest.raises(ContractError, match=f"sampled {greatest}; .* below {greatest},"):
        make_algorithm(vocab_size=greatest).build_batch(rollouts)


def test_what_it_raises_passes_with_a_note(make_algorithm):
    with pytest.raises(KeyError, match="adv") as raised:
        make_algorithm(lambda rollouts: rollouts.batch.token_columns["adv"]).build_batch(ROLLOUTS)
    assert raised.value.__notes__ == [f"raised in build_batch of {LABEL}"]
    assert owner_of(raised.value) == LABEL


def test_one_that_would_end_the_process_is_an_error(make_algorithm):
    with pytest.raises(PluginError, match=r"build_batch of .*SystemExit\(0\)"):
        make_algorithm(lambda rollouts: sys.exit(0)).build_batch(ROLLOUTS)


@pytest.mark.parametrize("name", ["rewards", "group_ids", "valid", "finish_reasons", "truncated"])
def test_figures_of_the_samples_cannot_be_written_to(make_algorithm, name):
    def write(rollouts):
        getattr(rollouts, name)[0] = 0

    with pytest.raises(ValueError, match="read-only"):
        make_algorithm(write).build_batch(ROLLOUTS)
    getattr(ROLLOUTS, name)[0] = getattr(ROLLOUTS, name)[0]  # only for the algorithm


@pytest.mark.parametrize(
    "name", ["tokens", "offsets", "loss_mask", "generation_logprobs", "group_ids", "rewards", "turn_of", "sampling_mask"]
)
def test_tokens_and_columns_of_the_samples_cannot_be_written_to(make_algorithm, name):
    """What a batch shares with the rollouts would be trained on as it was left."""
    column = np.zeros(4, np.float32)
    turns = TurnRewards(rewards=np.ones(2, np.float32), offsets=np.arange(3), turn_of=np.asarray([-1, 0, -1, 0], np.int32))
    mask = SamplingMask.of([np.arange(2, dtype=np.int32)] * 4)
    batch = attrs.evolve(BATCH.with_token_column("generation_logprobs", column), sampling_mask=mask)
    rollouts = attrs.evolve(ROLLOUTS, batch=batch, turns=turns)

    def write(given):
        batch = given.batch
        if name in ("rewards", "turn_of"):
            getattr(given.turns, name)[-1] = 0
        elif name == "sampling_mask":
            batch.sampling_mask.tokens[-1] = 0
        elif name in ("tokens", "offsets", "loss_mask"):
            getattr(batch, name)[-1] = 0
        else:
            {**batch.token_columns, **batch.sequence_columns}[name][-1] = 0

    with pytest.raises(ValueError, match="read-only"):
        make_algorithm(write).build_batch(rollouts)
    column[-1] = column[-1]  # only for the algorithm


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compares": "parts"}, "needs.compares: found 'parts'; expected one of 'rewards', 'turn_rewards'"),
        ({"source": "rollout"}, "needs.source: found 'rollout'; expected one of 'rollouts', 'demonstrations'"),
        ({"whole_groups": 2}, "needs.whole_groups: found 2; expected one of False, True"),
        ({"dynamic_sampling": 1}, "needs.dynamic_sampling: found 1; expected one of False, True"),
        ({"reference_logprobs_in_rollouts": True}, "needs.reference_logprobs_in_rollouts: found True without"),
        ({"entropy": "yes"}, "needs.entropy: found 'yes'; expected one of False, True"),
        ({"min_samples_per_prompt": "2"}, "needs.min_samples_per_prompt: found a str; expected an int"),
    ],
)
def test_needs_that_there_are_not_are_refused(make_algorithm, changes, text):
    with pytest.raises(PluginError) as raised:
        make_algorithm(needs=attrs.evolve(NEEDS, **changes))
    assert f"{LABEL} does not fit its role" in str(raised.value)
    assert text in str(raised.value)


@pytest.mark.parametrize("ids", [None, [1, 0]])
def test_groups_that_are_to_stay_whole_have_to_be_known(make_algorithm, ids):
    columns = {} if ids is None else {GROUP_IDS: np.asarray(ids, np.int32)}
    lost = attrs.evolve(GOOD, batch=attrs.evolve(BATCH, sequence_columns=columns))
    assert make_algorithm(lost).build_batch(ROLLOUTS) is lost
    with pytest.raises(ContractError, match=r"group_ids.*found (none|one whose)"):
        make_algorithm(lost, attrs.evolve(NEEDS, whole_groups=True)).build_batch(ROLLOUTS)


def test_the_loops_own_names_are_all_known():
    """Those that functions of the loop return by name; phases and parts have prefixes of their own."""
    from rlcore.run.train_step.metrics import throughput_metrics, training_metrics
    from rlcore.spi import TrainStepResult

    step = TrainStepResult(weight_version=1, loss=0.0, grad_norm=0.0, learning_rate=0.0)
    written = {"step", "weight_version", "updates", *training_metrics([step]), *throughput_metrics(ROLLOUTS, 1.0)}
    assert written <= OWN_METRICS
    assert not any(name.startswith(OWN_PREFIXES) for name in OWN_METRICS)


def test_the_algorithm_sees_all_that_the_rollouts_say_and_changes_none_of_it(make_algorithm):
    seen = []
    rollouts = attrs.evolve(
        ROLLOUTS,
        weight_version=7,
        truncated=np.array([False, True]),
        reward_components={"answer": np.ones(2, np.float32)},
        rows=({"prompt": "a"},),
    )
    make_algorithm(lambda given: seen.append(given) or GOOD).build_batch(rollouts)
    (given,) = seen
    fields = {field.name for field in attrs.fields(RolloutBatch)}
    named = ("rewards", "valid", "finish_reasons", "truncated")
    assert fields == {"batch", "reward_components", "rows", "turns", "weight_version", *named}
    assert (given.weight_version, given.turns, given.rows) == (7, None, ({"prompt": "a"},))
    for name in named:
        np.testing.assert_array_equal(getattr(given, name), getattr(rollouts, name))
    with pytest.raises(ValueError, match="read-only"):
        given.reward_components["answer"][0] = 2.0


class Judge:
    """Measures values, and returns what is given."""

    needs = AlgorithmNeeds(source="demonstrations", head="value")

    def __init__(self, context, config):
        pass

    def build_batch(self, rollouts):
        return GOOD

    def measure_values(self, examples, values):
        return {"mean": float(values.mean())}


def test_values_of_held_out_rows_are_measured_and_what_comes_of_it_is_checked(backends, make_provider):
    backends.Algorithm = Judge
    provider = make_provider("acme", backend="fake_backends:Algorithm", capabilities=())
    (entry,) = Registry.from_providers({"algorithm": [provider]}).of("algorithm")
    handle = build_algorithm(entry, CONTEXT, provider.config())
    assert handle.measures
    assert handle.measure_values(ROLLOUTS, np.full(4, 0.5, np.float32)) == {"mean": 0.5}
    with pytest.raises(NonFiniteError, match="measure_values returned"):
        handle.measure_values(ROLLOUTS, np.full(4, np.nan, np.float32))


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (AlgorithmNeeds(source="rollouts", head="value"), "source"),
        (AlgorithmNeeds(source="preferences", head="value", reference_logprobs=True), "reference_logprobs"),
        (AlgorithmNeeds(source="preferences", head="value", entropy=True), "entropy"),
        (AlgorithmNeeds(source="preferences", head="scalar"), "head"),
    ],
)
def test_an_algorithm_of_values_needs_nothing_of_tokens(make_algorithm, needs, text):
    with pytest.raises(PluginError, match=text):
        make_algorithm(needs=needs)


class Reader:
    """Reads rows, and has a teacher whose prompts are a token longer."""

    needs = NEEDS
    read = None
    sequences = None

    def __init__(self, context, config):
        pass

    def build_batch(self, rollouts):
        return GOOD

    def read_rows(self, rows, tokenizer):
        if not all("hint" in row for row in rows):
            raise DataError("found a row without a hint")
        type(self).read = (rows, tokenizer)

    def teacher_batch(self, rollouts):
        return self.sequences


LONGER = TokenBatch(
    tokens=np.array([9, 0, 1, 9, 2, 3], np.int32),
    offsets=np.array([0, 3, 6]),
    loss_mask=np.array([False, False, True] * 2),
)


@pytest.fixture
def reader(backends, make_provider):
    backends.Algorithm = Reader
    provider = make_provider("acme", backend="fake_backends:Algorithm", capabilities=())
    (entry,) = Registry.from_providers({"algorithm": [provider]}).of("algorithm")
    return build_algorithm(entry, CONTEXT, provider.config())


def test_rows_are_shown_to_an_algorithm_that_reads_them(reader, make_algorithm):
    tokenizer, rows = object(), ({"hint": "a"},)
    reader.read_rows(rows, tokenizer)
    assert Reader.read == (rows, tokenizer)
    with pytest.raises(DataError, match="hint") as raised:
        reader.read_rows([{}], tokenizer)
    assert owner_of(raised.value) == LABEL
    make_algorithm().read_rows([{}], tokenizer)  # which reads none


def test_log_probabilities_are_of_the_teachers_sequences_where_there_are_some(reader, make_algorithm, monkeypatch):
    monkeypatch.setattr(Reader, "sequences", LONGER)
    assert reader.reprompts
    assert reader.teacher_batch(ROLLOUTS) is LONGER
    assert not make_algorithm().reprompts
    assert make_algorithm().teacher_batch(ROLLOUTS) is ROLLOUTS.batch


@pytest.mark.parametrize(
    "changed", [{"tokens": np.array([9, 0, 1, 9, 2, 4], np.int32)}, {"loss_mask": np.array([False, True, True] * 2)}]
)
def test_a_teacher_of_other_loss_tokens_is_refused(reader, monkeypatch, changed):
    monkeypatch.setattr(Reader, "sequences", attrs.evolve(LONGER, **changed))
    with pytest.raises(ContractError, match="teacher_batch"):
        reader.teacher_batch(ROLLOUTS)
