"""`rlcore serve` as a teacher: its log-probabilities of prompts, and the recipe of docs/recipes.md against it."""

import contextlib
import json
import urllib.request
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from openai_servers import rlcore_serve, serving
from transformers import AutoModelForCausalLM

from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import ModelError, ModelSpec, TokenBatch
from rlcore_distill.config import TeacherConfig
from rlcore_torchkit.rl.endpoint_logprobs import EndpointModel, decoder_of
from rlcore_torchkit.testing.models import make_model

ALPHABET = "0123456789+="
RECIPES = Path(__file__).parents[2] / "recipes"
SEQUENCES = [[3, 4, 5, 6], [7, 8, 9, 10, 11, 3], [4], [5, 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher, its student, and a model with another tokenizer."""
    folder = tmp_path_factory.mktemp("teachers")
    shape = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "max_length": 256}
    make_model(folder / "student", "qwen3", alphabet=ALPHABET, **shape)
    make_model(folder / "teacher", "qwen3", seed=3, alphabet=ALPHABET, initializer_range=0.1, **shape)
    make_model(folder / "stranger", "qwen3", alphabet="=+9876543210", **shape)
    return folder


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.wide)])
def url(folder, request, tmp_path_factory):
    """The address of a teacher that `rlcore serve` answers for."""
    options = []
    if request.param == "vllm":
        pytest.importorskip("vllm")
        options = ["generator.vllm.cpu_kv_cache_gib=0.1"]
    command = [*rlcore_serve(str(folder / "teacher"), generator=request.param), *options]
    with serving(command, tmp_path_factory.mktemp("log") / "log.txt") as url:
        yield url


def table_of(folder, tokens):
    """float64 [length - 1, V]: the teacher's log-probabilities of the token after each one, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1).numpy()


def batch_of(sequences):
    offsets = np.cumsum([0, *map(len, sequences)])
    tokens = np.concatenate(sequences).astype(np.int32)
    return TokenBatch(tokens=tokens, offsets=offsets, loss_mask=np.zeros(len(tokens), bool))


def test_a_prompt_is_scored_as_transformers_scores_it(folder, url):
    tokens = SEQUENCES[1]
    body = {"model": "policy", "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 3}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        (choice,) = json.loads(response.read())["choices"]
    first, *entries = choice["prompt_logprobs"]
    assert first is None
    for token, entry, row in zip(tokens[1:], entries, table_of(folder, tokens), strict=True):
        most = np.argsort(-row)[:3]
        assert set(entry) == {str(one) for one in (token, *most)}
        for one, told in entry.items():
            np.testing.assert_allclose(told["logprob"], row[int(one)], atol=1e-3)
        assert [entry[str(one)]["rank"] for one in most] == [1, 2, 3]
        assert entry[str(token)]["decoded_token"] == ALPHABET[token - 2]


def test_it_is_a_teacher(folder, url):
    config = TeacherConfig(base_url=url)
    teacher = EndpointModel("teacher", config, decoder_of(ModelSpec(path=str(folder / "student"))))
    found = teacher.logprobs(batch_of(SEQUENCES))
    expected = [[0.0, *table_of(folder, one)[np.arange(len(one) - 1), one[1:]]] for one in SEQUENCES]
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-3)
    stranger = EndpointModel("teacher", config, decoder_of(ModelSpec(path=str(folder / "stranger"))))
    with pytest.raises(ModelError) as raised:
        stranger.logprobs(batch_of(SEQUENCES))
    assert "by the tokenizer of model.path" in raised.value.problems[0].found


RECIPE = """
[run]
num_steps = 2
device = "cpu"
[model]
path = "student"
[algorithm]
name = "{algorithm}"
{section}
[environment]
name = "arithmetic"
[environment.arithmetic]
max_operand = 9
num_train = 32
num_evaluation = 8
[generator]
name = "transformers"
[trainer]
name = "fsdp2"
[rollout]
samples_per_prompt = 2
max_prompt_tokens = 4
max_response_tokens = 3
[training]
prompts_per_step = 4
[evaluation]
at_start = false
at_end = false
[sinks]
names = []
"""


def metrics(folder, name, algorithm, section, *options):
    """The metrics of each step of a run."""
    recipe = folder / f"{name}.toml"
    recipe.write_text(RECIPE.format(algorithm=algorithm, section=section))
    with contextlib.chdir(folder):
        train(prepare(recipe, [f"run.name={name}", *options]), resume=False, progress=Progress())
    return pandas.read_json(folder / "runs" / name / "metrics.jsonl", lines=True)


def test_a_run_equals_one_with_the_teacher_in_the_trainer(folder, url, request):
    section = f'[algorithm.distill.teachers.only]\nbase_url = "{url}"'
    remote = metrics(folder, f"remote-{request.node.callspec.id}", "distill", section)
    local = metrics(folder, f"local-{request.node.callspec.id}", "distill", "", "reference.path=teacher")
    columns = ["loss", "reverse_kl", "grad_norm"]
    np.testing.assert_allclose(remote[columns].to_numpy(), local[columns].to_numpy(), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_it_is_the_reference_of_a_run(folder, url, request, algorithm):
    """Two steps equal those with the reference in the trainer. The KL divergence is above 0, as the models differ."""
    options = f"[algorithm.{algorithm}]\nkl_coefficient = 0.3\n"
    names = [f"{kind}-{request.node.callspec.id}" for kind in ("remote", "local")]
    remote = metrics(folder, names[0], algorithm, f'{options}[algorithm.{algorithm}.reference_endpoint]\nbase_url = "{url}"')
    local = metrics(folder, names[1], algorithm, options, "reference.path=teacher")
    columns = ["loss", "grad_norm", "reward_kl" if algorithm == "ppo" else "kl"]
    assert (remote[columns[-1]] > 0).all()
    np.testing.assert_allclose(remote[columns].to_numpy(), local[columns].to_numpy(), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("distill-endpoint", "algorithm.distill.teachers.grpo.base_url"),
        ("grpo-reference-endpoint", "algorithm.grpo.reference_endpoint.base_url"),
    ],
)
def test_the_recipes_train_against_it(folder, url, request, name, key):
    directory = folder / f"recipes-{request.node.callspec.id}"
    sizes = ["run.num_steps=2", "training.prompts_per_step=4", "schedule.warmup_steps=1"]
    sizes += ["environment.arithmetic.num_train=64", "environment.arithmetic.num_evaluation=4"]
    overrides = [f"{key}={url}", f"model.path={folder / 'student'}", f"run.directory={directory}", "trainer.name=fsdp2"]
    train(prepare(RECIPES / f"{name}.toml", [*overrides, *sizes]), resume=False, progress=Progress())
    found = pandas.read_json(directory / name / "metrics.jsonl", lines=True)
    assert len(found) >= 2
    assert (found["reverse_kl" if name.startswith("distill") else "kl"].dropna() > 0).all()
