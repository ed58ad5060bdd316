"""`rlcore eval`: a model or a checkpoint is measured alone, where a run would have measured it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.binding import build_generator
from rlcore.registry.discovery import Registry
from rlcore.run import evaluate as evaluate_module
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.spi import CheckpointError, PluginError, RankInfo
from rlcore.testing.fakes import FAKE_GENERATOR, FAKE_TRAINER, FakeTokenizer

from .conftest import FAKES, read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


def measured(prepared: Any, checkpoint: Path | None) -> dict[str, float]:
    return evaluate_module.evaluate(prepared, checkpoint=checkpoint, progress=Progress(), tokenizer=FakeTokenizer())


@pytest.mark.parametrize("offload", ["none", "state", "all"])
def test_a_checkpoint_is_measured_whatever_of_the_trainer_leaves_the_gpu(
    run: Run, prepared: Callable[..., Any], tmp_path: Path, offload: str
) -> None:
    turns = ("run.device=cuda", "model.dtype=float32", f"offload.trainer={offload}")
    run(*turns)
    directory = tmp_path / "runs" / "run"
    figures = measured(prepared(*turns), directory / "checkpoints" / "step-000006")
    last = read_metrics(directory)[-1]
    assert figures == {name: value for name, value in last.items() if name.startswith("eval/")}
    assert figures["eval/failed"] == 0.0


def test_a_generator_that_takes_no_weights_measures_its_own_without_a_trainer(
    prepared: Callable[..., Any], tmp_path: Path
) -> None:
    """As much as with a trainer that brings the same weights, whatever the cluster that one would run on."""
    prepared()  # writes the recipe
    without = {name for name in FAKE_GENERATOR.capabilities if not name.startswith("refit.")}
    alone = {role: [provider] for role, provider in FAKES.items() if role != "trainer"}
    alone["generator"] = [evolve(FAKE_GENERATOR, capabilities=without)]
    registry = Registry.from_providers(alone)
    apart = ["algorithm.fake.kl_coefficient=0.5", "cluster.reference_gpus_per_node=1", "reference.path=none"]
    apart += ["reference.trainer.expert_parallel=2"]  # of the trainer, which is not even installed
    plan = prepare(tmp_path / "recipe.toml", ["cluster.gpus_per_node=2", *apart], evaluating=True, registry=registry)
    assert plan.answers_alone
    figures = measured(plan, None)
    assert figures["eval/failed"] == 0.0
    generator = build_generator(plan.chosen["generator"], plan.generator_context(RankInfo(), None), plan.config("generator"))
    assert generator.weight_version == 0
    with pytest.raises(PluginError, match="takes no weights"):
        prepare(
            tmp_path / "recipe.toml",
            evaluating=True,
            continues=True,
            registry=Registry.from_providers({**alone, "trainer": [FAKE_TRAINER]}),
        )


def test_a_damaged_checkpoint_is_said_before_anything_is_read_or_built(
    run: Run, prepared: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("run.num_steps=2")
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step-000002"
    (checkpoint / "loop.json").write_text("{}")
    monkeypatch.setattr(evaluate_module, "load_inputs", lambda *_: pytest.fail("data are read"))
    with pytest.raises(CheckpointError, match="is no intact checkpoint"):
        measured(prepared(), checkpoint)


def rows_of(tmp_path: Path) -> list[str]:
    """Overrides for demonstrations, on which an evaluation has the environment's own rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "2+2=", "completion": "4"}\n' * 8)
    return ["algorithm.fake.source=demonstrations", "data.train.source=jsonl", f"data.train.path={file}"]


def test_demonstrations_are_measured_at_k_by_their_environment(prepared: Callable[..., Any], tmp_path: Path) -> None:
    several = ["evaluation.samples_per_prompt=4", "evaluation.pass_at_k=[4]", "evaluation.temperature=1.0"]
    plan = prepared(*rows_of(tmp_path), "data.evaluation.source=environment", *several)
    assert not plan.measures_examples
    figures = measured(plan, None)
    assert 0.0 <= figures["eval/pass@1"] <= figures["eval/pass@4"] <= 1.0
    assert figures["eval/failed"] == 0.0
