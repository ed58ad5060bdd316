"""A run of the inner ring alone, with the fakes: prompts of a file to a metrics file, without the outer ring."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.config.model import ModelConfig
from rlcore.config.plugin_choice import NamedPluginChoice, PluginChoice
from rlcore.config.recipe import Recipe, RolloutConfig, RunConfig, TrainingConfig
from rlcore.run.data.jsonl_rows import read
from rlcore.run.report.progress import Progress
from rlcore.run.synchronous.run import SynchronousRun
from rlcore.spi import DataError, DataSourceRequest, OptimizerSpec, PluginError, Row
from rlcore.testing.fakes import FakeTokenizer, fake_registry
from rlcore.testing.fakes.algorithm import FakeAlgorithmConfig
from rlcore.testing.fakes.environment import FakeEnvironmentConfig

ROWS: list[Row] = [{"prompt": f"{letter}bc:"} for letter in "abcdefgh"]
OUTER = ("rlcore.run.plan", "rlcore.run.storage", "rlcore.cli", "torch", "ray", "transformers")
ALONE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_run
from pathlib import Path
test_run.trained(Path(sys.argv[1]))
print([name for name in sys.modules if name.startswith({OUTER!r})])
"""


def recipe(*, num_steps: int = 6, num_turns: int = 1, trainer: str = "fake", max_prompt_tokens: int = 16) -> Recipe:
    environment = FakeEnvironmentConfig(num_turns=num_turns)
    algorithm = FakeAlgorithmConfig(kl_coefficient=0.01)
    return Recipe(
        model=ModelConfig(path="none"),
        trainer=PluginChoice(name=trainer),
        generator=PluginChoice(name="fake"),
        algorithm=NamedPluginChoice(name="fake", options={"fake": algorithm}),
        environment=NamedPluginChoice(name="fake", options={"fake": environment}),
        run=RunConfig(num_steps=num_steps),
        optimizer=OptimizerSpec(learning_rate=0.3),
        rollout=RolloutConfig(max_prompt_tokens=max_prompt_tokens, max_response_tokens=24, max_turns=num_turns),
        training=TrainingConfig(prompts_per_step=8, minibatches_per_step=2),
    )


def trained(directory: Path, chosen: Recipe | None = None) -> list[dict[str, float]]:
    prompts, metrics = directory / "prompts.jsonl", directory / "metrics.jsonl"
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    sections = {"limit": None, "subset": None, "split": None, "prompt_field": "prompt"}
    rows = read(DataSourceRequest(path=str(prompts), key="data.train", check=lambda *_: None, **sections))
    run = SynchronousRun(recipe=chosen or recipe(), registry=fake_registry(), tokenizer=FakeTokenizer(), rows=rows)
    run.train(metrics, Progress())
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.parametrize("num_turns", [1, 3])
def test_it_learns(tmp_path: Path, num_turns: int) -> None:
    steps = trained(tmp_path, recipe(num_turns=num_turns))
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["weight_version"] for step in steps] == [2, 4, 6, 8, 10, 12]
    assert steps[-1]["reward_mean"] > 2 * steps[0]["reward_mean"]
    assert all(step["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4) for step in steps)
    assert all(step["reward/target"] == pytest.approx(step["reward_mean"]) for step in steps)


def test_it_follows_from_its_seed(tmp_path: Path) -> None:
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        runs.append(trained(tmp_path / name, recipe(num_steps=2)))
    one, other = (
        [{key: step[key] for key in step if "time/" not in key and "per_s" not in key} for step in run] for run in runs
    )
    assert one == other


def test_it_needs_nothing_of_the_outer_ring(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        (recipe(max_prompt_tokens=2), DataError, "prompt of 4 tokens; expected at most 2"),
        (recipe(trainer="other"), PluginError, "trainer: found 'other'"),
    ],
)
def test_what_it_cannot_train_on_is_named(tmp_path: Path, chosen: Recipe, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trained(tmp_path, chosen)
