"""The Megatron trainer in this process: the recipe of another trainer, an engine beside it, and what is said of it."""

import json
from importlib import metadata

import pytest

from rlcore.run.plan import prepare
from rlcore_megatron.setup import requirements
from rlcore_torchkit.testing.models import make_model

from .system_support import (  # type: ignore[import-not-found]
    DIGITS,
    STEPS_ALONE,
    Workplace,
    expect_failure,
    read_metrics,
)

SHORT = ("run.num_steps=3", "training.prompts_per_step=8", "rollout.samples_per_prompt=8")


def test_its_name_is_all_that_changes_in_a_recipe(workplace: Workplace) -> None:
    """With a reference policy, an entropy, several updates and a schedule."""
    options = (
        *SHORT,
        "algorithm.grpo.kl_coefficient=0.1",
        "algorithm.grpo.entropy_coefficient=0.01",
        "algorithm.grpo.previous_logprobs=trainer",
        "training.minibatches_per_step=2",
        "schedule.warmup_steps=3",
        'schedule.decay="cosine"',
    )
    runs = [
        workplace.train("grpo.toml", *options, f"trainer.name={name}", f"run.name={name}") for name in ("fsdp2", "megatron")
    ]
    one, other = map(read_metrics, runs)
    assert sum(record["updates"] for record in one[1:]) > 2
    for found, expected in zip(other, one, strict=True):
        assert found == {name: pytest.approx(value, rel=1e-4, abs=1e-4) for name, value in expected.items()}


def test_an_engine_in_the_same_process_agrees_with_it(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> None:
    # The engine's attention on CPU takes heads of at least 32.
    model = make_model(tmp_path_factory.mktemp("wide") / "model", alphabet=DIGITS, hidden_size=64, num_heads=2, max_length=64)
    names = ("trainer.name=megatron", "generator.name=vllm", "generator.vllm.cpu_kv_cache_gib=0.1")
    records = read_metrics(workplace.train("grpo.toml", *SHORT, *names, f"model.path={model}"))
    assert sum(record["updates"] for record in records[1:]) > 0
    assert all(record["token_mult_prob_error"] < 1.0005 for record in records[1:])


def test_a_checkpoint_of_another_trainer_is_refused(workplace: Workplace) -> None:
    workplace.train("grpo.toml", "run.num_steps=2", "trainer.name=fsdp2")
    result = workplace.rlcore("train", "grpo.toml", "trainer.name=megatron", "--resume")
    expect_failure(
        result, 6, "step-000002 was saved by trainer 'fsdp2'; this run has 'megatron'", "Set trainer.name to 'fsdp2'"
    )
    assert read_metrics(workplace.train("grpo.toml", "trainer.name=fsdp2", "--resume"))[-1]["step"] == 4


def test_on_a_cpu_auto_passes_it_over_in_silence(workplace: Workplace) -> None:
    """Its section may stay in a recipe that another trainer takes."""
    result = workplace.rlcore("check", "grpo.toml", "trainer.megatron.tensor_parallel=2")
    assert result.exit_code == 0, result.stderr
    assert "trainer       fsdp2" in result.stdout
    assert "megatron" not in result.stdout + result.stderr


INSTALL = "megatron-core is not installed: pip install 'megatron-core<0.20,>=0.16.1'"


@pytest.fixture
def without_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the plugin's requirement were not installed."""
    real = metadata.version

    def version(name: str) -> str:
        if name == "megatron-core":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(requirements.metadata, "version", version)


def listed(workplace: Workplace, device: str) -> tuple[dict[str, object], str]:
    """What `rlcore plugins` has of it on a device, and the trainer that "auto" takes there."""
    listing = json.loads(workplace.rlcore("plugins", "--json", "--device", device).stdout)
    (plugin,) = (plugin for plugin in listing["plugins"] if plugin["name"] == "megatron")
    return plugin, listing["auto"]["trainer"]["name"]


def test_it_is_listed_with_where_it_is_meant_for(workplace: Workplace) -> None:
    on_cpu, taken = listed(workplace, "cpu")
    assert (on_cpu["usable"], taken) == (True, "fsdp2")
    assert on_cpu["reason"] == "meant for cuda, so 'auto' passes it over on cpu; it can be named"
    on_cuda, taken = listed(workplace, "cuda")
    assert (on_cuda["usable"], on_cuda["reason"], taken) == (True, None, "megatron")


@pytest.mark.usefixtures("without_megatron_core")
def test_without_megatron_core_it_is_listed_with_the_remedy(workplace: Workplace) -> None:
    for device in ("cpu", "cuda"):
        plugin, taken = listed(workplace, device)
        assert (plugin["usable"], plugin["reason"], taken) == (False, INSTALL, "fsdp2")
    result = workplace.rlcore("check", "grpo.toml", "trainer.name=megatron")
    expect_failure(result, 3, f"trainer 'megatron' is not usable: {INSTALL}", "fsdp2 (rlcore-fsdp2 0.1.0, priority 50): usable")


@pytest.mark.usefixtures("without_megatron_core")
def test_without_megatron_core_auto_says_what_it_takes_where_it_would_have_taken_it(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = workplace.rlcore("check", "grpo.toml")
    assert (on_cpu.exit_code, on_cpu.stderr) == (0, "")
    monkeypatch.setattr(prepare, "detect_device", lambda: "cuda")
    on_cuda = workplace.rlcore("check", "grpo.toml", "run.device=cuda", "generator.name=transformers")
    assert on_cuda.exit_code == 0, on_cuda.stderr
    assert "trainer       fsdp2" in on_cuda.stdout
    expected = f"trainer 'fsdp2' (priority 50) is taken, as 'megatron' (priority 80) cannot be: {INSTALL}"
    assert on_cuda.stderr == f"note: {expected}\n"


def test_what_its_schedule_is_too_long_for_is_told(workplace: Workplace) -> None:
    """Before anything is allocated, where Megatron would stop in the first step; or as the rate that the run gets to."""
    table = "trainer.megatron.scheduler"
    options = ("trainer.name=megatron", "run.num_steps=3", "optimizer.learning_rate=0.01", *STEPS_ALONE)
    refused = workplace.rlcore("check", "grpo.toml", *options, f"{table}.lr_warmup_steps=3", f"{table}.min_lr=0.1")
    assert refused.exit_code == 2, refused.output
    assert f"{table}.lr_warmup_steps: found 3" in refused.output
    assert f"{table}.min_lr: found 0.1" in refused.output
    longer = (*options, f"{table}.lr_warmup_steps=8", f"{table}.lr_decay_steps=9", "schedule.warmup_steps=50")
    noted = workplace.rlcore("check", "grpo.toml", *longer)
    assert noted.exit_code == 0, noted.output
    told = " ".join(noted.output.split())
    assert "the run makes 3 optimizer steps: 0.0025 is all that it reaches" in told
    assert "takes its place: its lr_warmup_steps is read, and no warmup_steps" in told
    assert told.count("is all that it reaches") == 1, "the recipe's own warm-up is not that of the run"
    metrics = read_metrics(workplace.train("grpo.toml", *longer, *SHORT))
    rates = [record["learning_rate"] for record in metrics if record["updates"]]
    assert max(rates) == pytest.approx(0.0025)
