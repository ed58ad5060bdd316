"""What a recipe with the Megatron trainer can get wrong, as a user meets it: one clear message before anything is allocated."""

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest

from rlcore.run.plan.prepare import prepare
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, ModelError, PluginError
from rlcore_megatron.checkpoints import cache_directory
from rlcore_megatron.setup import requirements
from rlcore_torchkit.testing.models import make_model

RECIPE = """
[model]
path = "{model}"
[algorithm]
name = "grpo"
[environment]
name = "arithmetic"
[trainer]
name = "megatron"
[generator]
name = "transformers"
[rollout]
max_prompt_tokens = 16
max_response_tokens = 8
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of four experts, four heads, two of them for keys."""
    return make_model(tmp_path_factory.mktemp("bad-input") / "model", "qwen3_moe", num_layers=4)


@pytest.fixture
def check(tmp_path: Path, model: Path):
    """A function (overrides, model) that does what `rlcore check` does."""

    def run(*overrides: str, path: Path = model) -> RunPlan:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(RECIPE.format(model=path))
        return prepare(recipe, ["run.device=cpu", *overrides])

    return run


def ranks(number: int) -> str:
    return f"cluster.gpus_per_node={number}"


def refused(check, error: type[Exception], *overrides: str, path: Path | None = None) -> str:
    with pytest.raises(error) as raised:
        check(*overrides, **({} if path is None else {"path": path}))
    return str(raised.value)


def one_problem(check, *overrides: str) -> str:
    """The only line of a ConfigError."""
    headline, line = refused(check, ConfigError, *overrides).split("\n")
    assert headline == "1 problem(s) in the recipe:"
    return line.removeprefix("  - ")


def test_a_good_recipe_is_right(check) -> None:
    prepared = check(ranks(4), "trainer.megatron.tensor_parallel=2", "trainer.megatron.expert_parallel=4")
    assert prepared.chosen["trainer"].name == "megatron"


def without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "megatron-core":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(requirements.metadata, "version", version)


def test_without_megatron_core_the_named_trainer_says_how_to_install_it(check, monkeypatch: pytest.MonkeyPatch) -> None:
    without_megatron(monkeypatch)
    message = refused(check, PluginError)
    assert message.startswith(
        "trainer 'megatron' is not usable: megatron-core is not installed: pip install 'megatron-core<0.20,>=0.16.1'\n"
    )


def test_without_megatron_core_auto_takes_fsdp2_and_says_why(check, monkeypatch: pytest.MonkeyPatch) -> None:
    without_megatron(monkeypatch)
    auto = ("trainer.name=auto", "run.device=cuda", "refit.channel=in_process")
    prepared = check(*auto)
    assert prepared.chosen["trainer"].name == "fsdp2"
    assert prepared.notes == (
        "trainer 'fsdp2' (priority 50) is taken, as 'megatron' (priority 80) cannot be: megatron-core is not installed: "
        "pip install 'megatron-core<0.20,>=0.16.1'",
    )
    assert check(*auto[::2], "run.device=cpu").notes == ()


@pytest.mark.parametrize(
    ("number", "sizes", "problem"),
    [
        (3, {"tensor_parallel": 2}, "tensor_parallel 2 x context_parallel 1 x pipeline_parallel 1 = 2 on 3 rank(s)"),
        (3, {"tensor_parallel": 3}, "tensor_parallel 3 for 4 attention heads; expected a divisor of 4. Choose one of 1, 2, 4"),
        (3, {"tensor_parallel": 3}, "tensor_parallel 3 for 2 key heads; expected a divisor or a multiple of 2."),
        (5, {"pipeline_parallel": 5}, "pipeline_parallel 5 for 4 layers; expected at most 4"),
        (3, {"expert_parallel": 3}, "expert_parallel 3 for 4 experts; expected a divisor of 4. Choose one of 1, 2, 4"),
        (7, {"tensor_parallel": 7}, "tensor_parallel 7 for 102 tokens of the vocabulary; expected a divisor of 102."),
        (
            8,
            {"context_parallel": 8},
            "context_parallel 8 for 4 attention heads; expected a divisor of 4: context ranks exchange",
        ),
        (4, {"expert_parallel": 8}, "expert_tensor_parallel 1 x expert_parallel 8 x pipeline_parallel 1 = 8 on 4 rank(s)"),
        (1, {"virtual_pipeline_parallel": 2}, "virtual_pipeline_parallel: found 2 with pipeline_parallel 1; expected 1."),
    ],
)
def test_layouts_that_do_not_divide(check, number: int, sizes: dict[str, int], problem: str) -> None:
    message = refused(check, ConfigError, ranks(number), *(f"trainer.megatron.{name}={size}" for name, size in sizes.items()))
    assert problem in message


def test_an_architecture_that_does_not_fit_its_model_type_is_refused(check, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"architectures": ["MixtralForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    assert refused(check, ModelError, path=other) == (
        f"1 problem(s) with the model:\n  - {other / 'config.json'}: found architecture MixtralForCausalLM; expected "
        "Qwen3MoeForCausalLM, the language model of model_type qwen3_moe. config.json names it under architectures"
    )


def test_a_conversion_directory_that_cannot_be_written_to(check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_directory.OWN, "/proc/self/rlcore")
    problem = one_problem(check, "trainer.megatron.conversion_cache=true")
    assert problem.startswith(
        f"{cache_directory.OWN}: found /proc/self/rlcore, whose parent /proc/self is where it would be made"
    )
    assert "expected a directory that can be written to. Set RLCORE_MEGATRON_CHECKPOINT_DIR to another directory" in problem


def test_a_conversion_directory_that_is_too_small(check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache_directory.OWN, str(tmp_path / "cache"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache_directory.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    problem = one_problem(check, "trainer.megatron.conversion_cache=true")
    assert problem.startswith(f"{cache_directory.OWN}: found {tmp_path / 'cache'} with 0.0 MiB free; expected ")
    assert "the size of the converted model. Free some, or: Set RLCORE_MEGATRON_CHECKPOINT_DIR to another directory" in problem
    assert not (tmp_path / "cache").exists()


def test_an_engine_that_breaks_megatron_is_named_with_the_one_to_install(check, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformer-engine": "2.14.0", "torch": "2.11.0"}
    monkeypatch.setattr(requirements, "transformer_engine_version", lambda: requirements.Version("2.14.0"))
    real = requirements.installed_version
    monkeypatch.setattr(
        requirements, "installed_version", lambda name: requirements.Version(versions[name]) if name in versions else real(name)
    )
    message = refused(check, PluginError)
    assert (
        "trainer 'megatron' is not usable: TransformerEngine 2.14.0 does not go with torch 2.11.0: it needs a newer" in message
    )
    assert "pip install --no-build-isolation 'transformer_engine[pytorch]==2.12.0'" in message


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "trainer.megatron.ddp.overlap_grad_reducce=true",
            "trainer.megatron.ddp.overlap_grad_reducce: found an unknown key; expected a field of Megatron's "
            "DistributedDataParallelConfig. Did you mean overlap_grad_reduce?",
        ),
        (
            "trainer.megatron.transformer.hidden_size=32",
            "trainer.megatron.transformer.hidden_size: found a field that is not for this table to set; expected another field "
            "of Megatron's TransformerConfig. Leave it out: it follows from the model at model.path",
        ),
        (
            "trainer.megatron.optimizer.lr=1e-5",
            "trainer.megatron.optimizer.lr: found a field that is not for this table to set; expected another field of "
            "Megatron's OptimizerConfig. Set optimizer.learning_rate",
        ),
        (
            'trainer.megatron.scheduler.lr_decay_style="steps"',
            "trainer.megatron.scheduler.lr_decay_style: found 'steps'; expected one of constant, linear, cosine, "
            "inverse-square-root, WSD",
        ),
        (
            "trainer.megatron.transformer.deallocate_pipeline_outputs=true",
            "trainer.megatron.transformer.deallocate_pipeline_outputs: found True; expected false on cpu. Without CUDA's "
            "streams an output that is freed while it is sent arrives wrong",
        ),
        (
            'trainer.megatron.pretrained_checkpoint="/nowhere"',
            "trainer.megatron.pretrained_checkpoint: found /nowhere, which is not there; expected a Megatron distributed "
            "checkpoint: a directory whose metadata.json names the format torch_dist",
        ),
        ("trainer.megatron.fp8=true", "trainer.megatron.fp8: found true on cpu; expected false. Float8 needs a GPU"),
    ],
)
def test_options_that_cannot_be_meant(check, override: str, problem: str) -> None:
    assert one_problem(check, override) == problem


@pytest.mark.parametrize(
    "override",
    [
        "trainer.megatron.tensor_paralel=2",
        'trainer.megatron.recompute="some"',
        'trainer.megatron.tensor_parallel="two"',
        "trainer.megatron.tensor_parallel=true",
        'trainer.megatron.expert_tensor_parallel="auto"',
    ],
)
def test_keys_and_types_of_the_section_itself(check, override: str) -> None:
    key = override.partition("=")[0]
    assert f"  - {key}: found" in refused(check, ConfigError, override)
