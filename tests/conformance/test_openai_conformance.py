"""rlcore-openai passes what the conformance kit asks of a generator that takes no weights, in front of two kinds of servers."""

import json
from pathlib import Path

import pytest
from attrs import evolve
from click.testing import CliRunner
from openai_servers import rlcore_serve, serving, vllm_serve

from rlcore.cli.main import cli
from rlcore.spi import capabilities
from rlcore_conformance.generators.generator_continuous import GeneratorContinuous
from rlcore_conformance.generators.generator_sampling import GeneratorSampling
from rlcore_conformance.generators.generator_streaming import GeneratorStreaming
from rlcore_conformance.references.fixtures import tiny_model
from rlcore_openai.config import OpenAIConfig
from rlcore_openai.provider import PROVIDER

RECIPE = """
[model]
path = "none"
[algorithm]
name = "grpo"
[environment]
name = "arithmetic"
[data.evaluation]
limit = 8
[run]
device = "cpu"
[rollout]
max_prompt_tokens = 32
max_response_tokens = 16
[evaluation]
temperature = 0.0
[sinks]
names = []
"""


class OpenAIConformance(GeneratorSampling, GeneratorStreaming):
    """On CPU both servers are exact and keep to seeds, so that more is asked for than the provider declares for all."""

    @pytest.fixture
    def provider(self):
        return evolve(
            PROVIDER, capabilities=PROVIDER.capabilities | {capabilities.PER_SAMPLE_SEEDS, capabilities.EXACT_LOGPROBS}
        )

    @pytest.fixture
    def generator(self, open_with_own_weights):
        return open_with_own_weights()


@pytest.fixture(scope="module")
def rlcore_server(tmp_path_factory):
    model = tiny_model(tmp_path_factory, seed=0)
    with serving(rlcore_serve(model.path), tmp_path_factory.mktemp("rlcore") / "log.txt") as url:
        yield model, url


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory):
    model = tiny_model(tmp_path_factory, seed=0, hidden_size=64, num_heads=2, tied=True)
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with serving(vllm_serve(model.path), log, VLLM_CPU_KVCACHE_SPACE="1") as url:
        yield model, url


class TestRlcoreServe(OpenAIConformance):
    """It hands out each answer at its end, so that nothing is there of one that is cut."""

    @pytest.fixture
    def model(self, rlcore_server):
        return rlcore_server[0]

    @pytest.fixture
    def config(self, rlcore_server):
        return OpenAIConfig(base_urls=(rlcore_server[1],))


@pytest.mark.wide
class TestVllmServe(OpenAIConformance, GeneratorContinuous):
    """It sends each token at once."""

    @pytest.fixture
    def model(self, vllm_server):
        return vllm_server[0]

    @pytest.fixture
    def config(self, vllm_server):
        return OpenAIConfig(base_urls=(vllm_server[1],))

    test_a_stream_that_ends_hands_out_what_has_not = None
    """A tiny model's tokens come all at once. tests/openai_generation has a stream that is cut, by an endpoint that waits."""


def test_the_command_measures_what_an_endpoint_has(rlcore_server, tmp_path):
    """Greedily, as much as of the same model here, and without a trainer or the model's weights."""
    model, url = rlcore_server
    (tmp_path / "recipe.toml").write_text(RECIPE)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).write_bytes((Path(model.path) / name).read_bytes())
    own = ["generator.name=transformers", f"model.path={model.path}"]
    remote = ["generator.name=openai", f'generator.openai.base_urls=["{url}"]', f"model.path={tokenizer}"]
    found = [CliRunner().invoke(cli, ["eval", str(tmp_path / "recipe.toml"), "--json", *more]) for more in (own, remote)]
    assert [one.exit_code for one in found] == [0, 0], found[1].output
    expected, measured = (json.loads(one.stdout) for one in found)
    assert measured == expected
    assert measured["eval/failed"] == 0.0
    file = tokenizer / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    content["model"]["vocab"] = dict(zip(words, [*list(words.values())[1:], words[next(iter(words))]], strict=True))
    file.write_text(json.dumps(content))
    refused = CliRunner().invoke(cli, ["eval", str(tmp_path / "recipe.toml"), *remote])
    assert refused.exit_code == 2
    assert "the tokenizer of model.path" in refused.output
