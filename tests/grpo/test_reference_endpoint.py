"""A reference policy behind an endpoint: its column in the batches of GRPO and PPO, and what is refused."""

import numpy as np
import pytest
from attrs import evolve
from scoring_server import endpoint, logprob, told
from transformers import AutoTokenizer

from rlcore.spi import (
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    VALUES,
    WEIGHT_VERSIONS,
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
from rlcore_grpo.algorithm import Grpo
from rlcore_grpo.check import check as check_grpo
from rlcore_grpo.config import GrpoConfig
from rlcore_ppo.algorithm import Ppo
from rlcore_ppo.check import check as check_ppo
from rlcore_ppo.config import PpoConfig
from rlcore_torchkit.rl.endpoint_config import EndpointConfig
from rlcore_torchkit.testing.models import make_model

NOWHERE = EndpointConfig(base_url="http://127.0.0.1:9/v1")
KINDS = {
    "grpo": (Grpo, GrpoConfig, {}),
    "grpo_reward": (Grpo, GrpoConfig, {"kl_placement": "reward", "advantage_normalisation": "none"}),
    "ppo": (Ppo, PpoConfig, {"advantage_normalisation": "none"}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model", max_length=64)


@pytest.fixture(scope="module")
def context(model):
    return AlgorithmContext(
        seed=0,
        samples_per_prompt=2,
        minibatches_per_step=1,
        temperature=1.0,
        generation_logprobs_exact=True,
        model=ModelSpec(path=str(model)),
    )


@pytest.fixture(scope="module")
def text_of(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda token: tokenizer.decode([token])


def rollouts(**columns):
    mask = np.array([False, True, True, False, False, True, True])
    return RolloutBatch(
        batch=TokenBatch(
            tokens=np.array([5, 6, 7, 8, 9, 10, 11], np.int32),
            offsets=np.array([0, 3, 7]),
            loss_mask=mask,
            token_columns={
                GENERATION_LOGPROBS: np.where(mask, np.float32(-1), np.float32(0)),
                WEIGHT_VERSIONS: np.where(mask, np.int32(0), np.int32(-1)),
                VALUES: np.zeros(7, np.float32),
                **columns,
            },
            sequence_columns={GROUP_IDS: np.zeros(2, np.int32)},
        ),
        rewards=np.array([1.0, 0.0], np.float32),
        valid=np.ones(2, bool),
        finish_reasons=np.zeros(2, np.uint8),
    )


def built(kind, context, url):
    algorithm, config, options = KINDS[kind]
    return algorithm(context, config(kl_coefficient=0.1, reference_endpoint=EndpointConfig(base_url=url), **options))


@pytest.mark.parametrize("kind", KINDS)
def test_its_batches_are_those_with_the_reference_in_the_trainer(context, text_of, kind):
    """The trainer is asked for no reference, and what is trained on is the same."""
    algorithm, config, options = KINDS[kind]
    places = [0, 1, 2, 0, 1, 2, 3]
    column = [logprob(token, place, 1.0) for token, place in zip(range(5, 12), places, strict=True)]
    reference = np.where(rollouts().batch.loss_mask, np.float32(column), np.float32(0))
    plain = algorithm(context, config(kl_coefficient=0.1, **options))
    expected = plain.build_batch(rollouts(**{REFERENCE_LOGPROBS: reference}))
    with endpoint(lambda body: told(body["prompt"], text_of)) as (url, asked):
        found = built(kind, context, url)
        training = found.build_batch(rollouts())
    assert plain.needs.reference_logprobs
    assert not found.needs.reference_logprobs
    assert not found.needs.reference_logprobs_in_rollouts
    assert training.batch.token_columns.keys() == expected.batch.token_columns.keys()
    for name, values in expected.batch.token_columns.items():
        np.testing.assert_allclose(training.batch.token_columns[name], values, rtol=1e-6, err_msg=name)
    assert training.loss.token_columns == expected.loss.token_columns
    assert training.metrics == pytest.approx(expected.metrics)
    assert len(asked) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_none_of_the_policys_kind_is_refused(context, text_of, kind):
    def renamed(body):
        entries = told(body["prompt"], text_of)
        return [None, *({token: {**one, "decoded_token": "other"} for token, one in row.items()} for row in entries[1:])]

    with endpoint(renamed) as (url, _), pytest.raises(ModelError) as raised:
        built(kind, context, url).build_batch(rollouts())
    (problem,) = raised.value.problems
    assert problem.path == f"algorithm.{kind.partition('_')[0]}.reference_endpoint.base_url"
    assert "the text 'other' for the token" in problem.found
    with pytest.raises(ConfigError):
        built(kind, evolve(context, temperature=0.7), NOWHERE.base_url)
    samples = rollouts()
    with pytest.raises(PluginError):
        masked = evolve(samples, batch=evolve(samples.batch, sampling_mask=SamplingMask.whole(7)))
        built(kind, context, NOWHERE.base_url).build_batch(masked)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"kl_coefficient": 0.1}, []),
        ({}, ["reference_endpoint"]),
        ({"kl_coefficient": 0.1, "reference_endpoint": EndpointConfig(base_url="a:1")}, ["reference_endpoint.base_url"]),
        (
            {"kl_coefficient": 0.1, "reference_endpoint": EndpointConfig(base_url="http://a", api_key_env="NO_SUCH_KEY")},
            ["reference_endpoint.api_key_env"],
        ),
    ],
)
def test_wrong_sections_are_named(options, keys):
    context = CheckContext(model=ModelSpec(path="none"), device="cpu", world_size=1, max_sequence_length=8)
    for name, check, config in (("grpo", check_grpo, GrpoConfig), ("ppo", check_ppo, PpoConfig)):
        found = check(context, config(**{"reference_endpoint": NOWHERE, **options}))
        assert [problem.path for problem in found] == [f"algorithm.{name}.{key}" for key in keys]
