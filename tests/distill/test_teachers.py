"""Teachers behind endpoints: their weighted column, and servers that are no such teacher."""

import numpy as np
import pytest
from attrs import evolve
from scoring_server import endpoint, logprob, told
from transformers import AutoTokenizer

from rlcore.spi import (
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    AlgorithmContext,
    CheckContext,
    ConfigError,
    ModelError,
    ModelSpec,
    PluginError,
    RolloutBatch,
    SamplingMask,
    TokenBatch,
)
from rlcore_distill.algorithm import Distill
from rlcore_distill.check import check
from rlcore_distill.config import DistillConfig, TeacherConfig
from rlcore_torchkit.testing.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model", max_length=64)


@pytest.fixture(scope="module")
def context(model):
    return AlgorithmContext(
        seed=0,
        samples_per_prompt=1,
        minibatches_per_step=1,
        temperature=1.0,
        generation_logprobs_exact=True,
        model=ModelSpec(path=str(model)),
    )


@pytest.fixture(scope="module")
def text_of(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda token: tokenizer.decode([token])


def rollouts():
    tokens = np.array([5, 6, 7, 8, 9, 10, 11], np.int32)
    mask = np.array([False, True, True, False, False, True, True])
    return RolloutBatch(
        batch=TokenBatch(
            tokens=tokens,
            offsets=np.array([0, 3, 7]),
            loss_mask=mask,
            token_columns={GENERATION_LOGPROBS: np.where(mask, np.float32(-1), np.float32(0))},
            sequence_columns={GROUP_IDS: np.arange(2, dtype=np.int32)},
        ),
        rewards=np.zeros(2, np.float32),
        valid=np.ones(2, bool),
        finish_reasons=np.zeros(2, np.uint8),
    )


def expected(scale):
    batch, places = rollouts().batch, [0, 1, 2, 0, 1, 2, 3]
    values = [logprob(token, place, scale) for token, place in zip(batch.tokens.tolist(), places, strict=True)]
    return np.where(batch.loss_mask, values, 0.0)


def test_the_column_is_the_weighted_mean_of_the_teachers(context, text_of, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "a-key-of-the-teacher")
    with (
        endpoint(lambda body: told(body["prompt"], text_of, 1.0)) as (first, asked),
        endpoint(lambda body: told(body["prompt"], text_of, 2.0)) as (second, _),
    ):
        teachers = {
            "a": TeacherConfig(base_url=first, weight=3.0, api_key_env="TEACHER_KEY"),
            "b": TeacherConfig(base_url=second, model="teacher"),
        }
        algorithm = Distill(context, DistillConfig(teachers=teachers))
        training = algorithm.build_batch(rollouts())
    assert not algorithm.needs.reference_logprobs
    assert not algorithm.needs.reference_model
    column = training.batch.token_columns[REFERENCE_LOGPROBS]
    np.testing.assert_allclose(column, 0.75 * expected(1.0) + 0.25 * expected(2.0), rtol=1e-6)
    mask = training.batch.loss_mask
    assert training.metrics == {
        "reverse_kl/a": pytest.approx((-1 - expected(1.0))[mask].mean(), rel=1e-6),
        "reverse_kl/b": pytest.approx((-1 - expected(2.0))[mask].mean(), rel=1e-6),
    }
    assert sorted((one["prompt"] for one in asked), key=len) == [[5, 6, 7], [8, 9, 10, 11]]
    assert {(one["model"], one["prompt_logprobs"], one["key"]) for one in asked} == {
        ("teacher", 0, "Bearer a-key-of-the-teacher")
    }


def shifted(entries):
    return [None, *({str(int(token) + 1): one for token, one in entry.items()} for entry in entries[1:])]


def renamed(entries):
    return [None, *({token: {**one, "decoded_token": "no such text"} for token, one in entry.items()} for entry in entries[1:])]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (shifted, "log-probabilities of the token ids"),
        (renamed, "the text 'no such text' for the token"),
        (lambda entries: entries[:-1], "log-probabilities of 2 tokens for 3"),
        (lambda entries: None, "a completion without prompt_logprobs"),
        (lambda entries: 400, "status 400"),
    ],
    ids=["other tokens", "another tokenizer", "too few", "none", "refused"],
)
def test_a_server_that_is_no_such_teacher_is_refused(context, text_of, change, found):
    with endpoint(lambda body: change(told(body["prompt"], text_of))) as (url, asked):
        algorithm = Distill(context, DistillConfig(teachers={"only": TeacherConfig(base_url=url, max_concurrent=1)}))
        with pytest.raises(ModelError) as raised:
            algorithm.build_batch(rollouts())
    (problem,) = raised.value.problems
    assert problem.path == "algorithm.distill.teachers.only.base_url"
    assert found in problem.found
    assert len(asked) <= 2, "no such answer is asked for again"


def test_a_server_that_is_busy_is_asked_again(context, text_of, monkeypatch):
    monkeypatch.setattr("rlcore_torchkit.rl.endpoint_logprobs.FIRST_PAUSE_S", 0.01)
    answers = iter([503, 429])
    with endpoint(lambda body: next(answers, None) or told(body["prompt"], text_of)) as (url, _):
        algorithm = Distill(context, DistillConfig(teachers={"only": TeacherConfig(base_url=url)}))
        training = algorithm.build_batch(rollouts())
    np.testing.assert_allclose(training.batch.token_columns[REFERENCE_LOGPROBS], expected(1.0), rtol=1e-6)
    assert training.metrics == {}
    gone = Distill(context, DistillConfig(teachers={"only": TeacherConfig(base_url=url, max_attempts=2)}))
    with pytest.raises(PluginError, match="2 attempts"):
        gone.build_batch(rollouts())


def test_a_check_asks_no_endpoint(context):
    algorithm = Distill(context, DistillConfig(teachers={"only": TeacherConfig(base_url="http://127.0.0.1:9/v1")}))
    samples = rollouts()
    made_up = evolve(samples, batch=evolve(samples.batch, tokens=np.zeros(7, np.int32)))
    assert REFERENCE_LOGPROBS in algorithm.build_batch(made_up).batch.token_columns


def test_what_an_endpoint_cannot_score_is_refused(context):
    config = DistillConfig(teachers={"only": TeacherConfig(base_url="http://127.0.0.1:9/v1")})
    with pytest.raises(ConfigError) as raised:
        Distill(evolve(context, temperature=0.7), config)
    assert [problem.path for problem in raised.value.problems] == ["rollout.temperature"]
    samples = rollouts()
    truncated = evolve(samples, batch=evolve(samples.batch, sampling_mask=SamplingMask.whole(7)))
    with pytest.raises(PluginError, match="top_k, top_p"):
        Distill(context, config).build_batch(truncated)


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        ({"teachers": {"a": TeacherConfig(base_url="http://a/v1")}}, []),
        ({"teachers": {"a": TeacherConfig(base_url="http://a/v1")}, "samples": "teacher"}, ["teachers"]),
        ({"teachers": {"a": TeacherConfig(base_url="a:1", weight=2.0)}}, ["teachers.a.weight", "teachers.a.base_url"]),
        ({"teachers": {"a": TeacherConfig(base_url="http://a", api_key_env="NO_SUCH_KEY")}}, ["teachers.a.api_key_env"]),
    ],
)
def test_wrong_teachers_are_named(options, paths):
    context = CheckContext(model=ModelSpec(path="none"), device="cpu", world_size=1, max_sequence_length=8)
    found = check(context, DistillConfig(**options))
    assert [problem.path for problem in found] == [f"algorithm.distill.{path}" for path in paths]
