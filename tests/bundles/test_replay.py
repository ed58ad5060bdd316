"""A step that was recorded and computed again: what is equal, what is rounding, and what differs first."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from click.testing import CliRunner

import rlcore
from rlcore.cli.main import cli
from rlcore.spi import ConfigError, ModelError
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.difference import compare, first_difference
from rlcore_bundles.layout import layout_overrides
from rlcore_bundles.perturbed import perturbed_start
from rlcore_bundles.recomputed_rewards import Rewards, recomputed_rewards
from rlcore_bundles.replay import replay
from rlcore_bundles.replay_command import replay_command
from rlcore_bundles.replaying import Replayed, Start, plan_of, replayed
from rlcore_bundles.storage import read_bundle
from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session

Compared = tuple[Replayed, list[Replayed], Rewards]


@pytest.fixture(scope="module")
def again(recorded: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """The step computed again, the same with changed weights, and its rewards."""
    start = Start.of(recorded)
    plan = plan_of(recorded, start, ())
    moved = perturbed_start(start, tmp_path_factory.mktemp("moved"), "float32", 1)
    others = [replayed(recorded, plan_of(recorded, moved, ()), moved, digests=False)]
    return replayed(recorded, plan, start, digests=True), others, recomputed_rewards(recorded, plan)


def test_a_step_with_the_optimizers_state_is_repeated_to_the_bit(recorded: Bundle, again: Compared) -> None:
    own, others, rewards = again
    rows = compare(recorded, own, others, rewards, whole=True)
    verdicts = {row.quantity: row.verdict for row in rows}
    generator = verdicts.pop("generator's log-probabilities")
    assert generator in ("equal", "rounding")  # another engine than the trainer
    assert set(verdicts.values()) == {"equal"}
    assert {"reward", "minibatches", "advantages", "update 1: log-probabilities", "update 2: loss"} <= verdicts.keys()
    assert verdicts["weights after the step"] == "equal"


def test_the_run_itself_is_the_same_with_and_without_bundles(
    recipe_of: Callable[..., Any], finished: Path, tmp_path: Path
) -> None:
    plain = rlcore.train(recipe_of(tmp_path, logging={"bundles_every_n_steps": 0}), progress="silent")
    assert not (plain.path / "bundles").exists()
    before, after = rlcore.load(finished).metrics, plain.metrics
    names = [name for name in before if not name.startswith(("time/", "tokens_per", "generated_tokens_per"))]
    for name in names:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.name=megatron"], "rounding"),
        (["model.dtype=bfloat16"], "rounding"),
        (["trainer.name=fsdp2", "model.dtype=float64"], "rounding"),
        (["training.max_tokens_per_microbatch=16"], "rounding"),
    ],
    ids=["another trainer", "another dtype", "float64", "other microbatches"],
)
def test_another_way_to_compute_the_step_differs_by_rounding_alone(
    recorded: Bundle, overrides: list[str], expected: str
) -> None:
    without_state = evolve(recorded, weights="model")
    found = replay(without_state, overrides)
    assert first_difference(found.rows) is None, found.rows
    assert expected in {row.verdict for row in found.rows}
    skipped = [row for row in found.rows if row.quantity.startswith("update 2:")]
    assert skipped
    assert {row.verdict for row in skipped} == {"not compared"}


def test_a_float64_replay_has_the_bound_of_the_recorded_dtype(recorded: Bundle) -> None:
    """Within it a difference of float32 is rounding; a temperature that is off by 1 in 10,000 is not."""
    wrong = _generation(recorded, lambda logprobs: logprobs * np.float32(0.9999))
    overrides = ["trainer.name=fsdp2", "model.dtype=float64"]
    assert first_difference(replay(recorded, overrides).rows) is None
    found = first_difference(replay(wrong, overrides).rows)
    assert found is not None
    assert found.quantity == "generator's log-probabilities"
    assert 0 < found.bound < 1e-4


@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_a_step_of_muon_is_repeated_in_float64(recipe_of: Callable[..., Any], tmp_path: Path, trainer: str) -> None:
    """The gradients and the momentum of the replay are float64; Muon's iterations are bfloat16 in every dtype."""
    (tmp_path / "score.py").write_text("def score(completion):\n    return completion[:1] in '0123456'\n")
    sections: dict[str, Any] = {
        "environment": {"function": {"path": f"{tmp_path / 'score.py'}:score"}},
        "optimizer": {"name": "muon", "learning_rate": 5e-4},
        "run": {"num_steps": 2, "device": "cpu"},
    }
    recipe = recipe_of(tmp_path, trainer={"name": trainer}, **sections)
    bundle = read_bundle(rlcore.train(recipe, progress="silent").path / "bundles" / "step-000002")
    assert len(bundle.updates) == 2
    found = replay(bundle, ["trainer.name=fsdp2", "model.dtype=float64"])
    assert first_difference(found.rows) is None, found.rows
    rounded = {row.quantity for row in found.rows if row.verdict == "rounding"}
    assert {"update 1: log-probabilities", "update 1: gradient norm", "update 1: gradient of a tensor"} <= rounded
    # A trainer reads no other trainer's state, so the second update is compared with fsdp2's own alone.
    assert ("update 2: log-probabilities" in rounded) == (trainer == "fsdp2"), found.rows
    wrong = _update(bundle, 0, grad_norm=bundle.updates[0].grad_norm * 1.001)
    planted = first_difference(replay(wrong, ["trainer.name=fsdp2", "model.dtype=float64"]).rows)
    assert planted is not None
    assert planted.quantity == "update 1: gradient norm"


@pytest.mark.wide
def test_a_step_of_megatron_on_two_ranks_is_repeated_in_float64(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "run": {"num_steps": 2, "device": "cpu"},
        "trainer": {"name": "megatron", "megatron": {"tensor_parallel": 2}},
        "cluster": {"execution": "ray", "gpus_per_node": 2},
        "generator": {"name": "transformers"},
        "training": {"minibatches_per_step": 1},
    }
    with ray_session(RayConfig(gpus_per_node=2, object_store_mib=100), "cpu", None):
        run = rlcore.train(recipe_of(tmp_path, **sections), progress="silent")
    bundle = read_bundle(run.path / "bundles" / "step-000002")
    found = replay(bundle, ["trainer.name=fsdp2", "model.dtype=float64"])
    assert first_difference(found.rows) is None, found.rows
    compared = {row.quantity for row in found.rows if row.verdict == "rounding"}
    assert {"update 1: log-probabilities", "update 1: gradient norm", "update 1: gradient of a tensor"} <= compared


def test_weights_of_another_dtype_are_not_compared(recorded: Bundle) -> None:
    rows = {row.quantity: row.verdict for row in replay(recorded, ["model.dtype=bfloat16"]).rows}
    assert rows["weights after the step"] == "not compared"


def _samples(bundle: Bundle, **changes: Any) -> Bundle:
    return evolve(bundle, sampled=evolve(bundle.sampled, **changes))


def _generation(bundle: Bundle, change: Callable[[Any], Any]) -> Bundle:
    batch = bundle.sampled.batch
    columns = {**batch.token_columns, "generation_logprobs": change(batch.token_columns["generation_logprobs"])}
    return _samples(bundle, batch=evolve(batch, token_columns=columns))


def _update(bundle: Bundle, number: int, **changes: Any) -> Bundle:
    updates = list(bundle.updates)
    updates[number] = evolve(updates[number], **changes)
    return evolve(bundle, updates=updates)


def _trained(bundle: Bundle, name: str, change: Callable[[Any], Any]) -> Bundle:
    columns = {**bundle.trained.token_columns, name: change(bundle.trained.token_columns[name])}
    return evolve(bundle, trained=evolve(bundle.trained, token_columns=columns))


def _one_more(column: Any, place: int | None = None) -> Any:
    changed = column.copy()
    changed[np.flatnonzero(changed)[0] if place is None else place] += 1e-3
    return changed


def _planted(bundle: Bundle) -> Iterator[tuple[str, Bundle, str]]:
    """Yield the name of each fault, a bundle with it, and the quantity that it shows in first."""
    first, second = bundle.updates
    yield "a reward", _samples(bundle, rewards=bundle.sampled.rewards + np.float32(0.5)), "reward"
    yield (
        "the generator's temperature",
        _generation(bundle, lambda one: one * np.float32(0.97)),
        "generator's log-probabilities",
    )
    yield "a token of the generator", _generation(bundle, _one_more), "generator's log-probabilities"
    yield "an advantage", _trained(bundle, "advantages", _one_more), "advantages"
    yield "the scale of advantages", _trained(bundle, "advantages", lambda one: one * np.float32(1.01)), "advantages"
    yield "a set of sequences", _update(bundle, 0, sequences=second.sequences), "minibatches"
    yield "an update", evolve(bundle, updates=bundle.updates[:1]), "minibatches"
    assert first.logprobs is not None
    token = int(np.flatnonzero(bundle.trained.loss_mask & (first.logprobs != 0))[0])
    yield "a log-probability", _update(bundle, 0, logprobs=_one_more(first.logprobs, token)), "update 1: log-probabilities"
    yield "a loss", _update(bundle, 0, loss_value=first.loss_value + 1e-3), "update 1: loss"
    yield "a gradient", _update(bundle, 1, grad_norm=second.grad_norm * 1.01), "update 2: gradient norm"
    yield "a learning rate", _update(bundle, 1, learning_rate=second.learning_rate * 1.01), "update 2: learning rate"
    name = next(iter(first.metrics))
    yield "a metric", _update(bundle, 0, metrics={**first.metrics, name: first.metrics[name] + 0.1}), "update 1: metrics"
    tensor = next(iter(bundle.digests_after))
    yield "a tensor", evolve(bundle, digests_after={**bundle.digests_after, tensor: 1}), "weights after the step"


def test_the_first_quantity_with_a_fault_is_named(recorded: Bundle, again: Compared) -> None:
    own, others, rewards = again
    found = {}
    for name, bundle, _ in _planted(recorded):
        first = first_difference(compare(bundle, own, others, rewards, whole=True))
        found[name] = None if first is None else first.quantity
    assert found == {name: quantity for name, _, quantity in _planted(recorded)}
    assert len(found) > 12


def test_the_place_of_a_difference_is_named(recorded: Bundle, again: Compared) -> None:
    own, others, rewards = again
    batch = recorded.sampled.batch
    token = int(np.flatnonzero(batch.loss_mask)[7])
    sequence = int(np.searchsorted(batch.offsets, token, side="right")) - 1

    def change(column: Any) -> Any:
        changed = column.copy()
        changed[token] -= 0.5
        return changed

    first = first_difference(compare(_generation(recorded, change), own, others, rewards, whole=True))
    assert first is not None
    assert first.difference == pytest.approx(0.5, abs=1e-5)
    assert first.where.startswith(f"sample {sequence}, token {token - int(batch.offsets[sequence])}:")


def test_the_command_names_the_first_difference_and_exits_with_1(recorded: Bundle, sums: Path) -> None:
    before = (sums / "score.py").read_text()
    (sums / "score.py").write_text(before.replace("==", "!="))
    try:
        ran = CliRunner().invoke(replay_command, [str(recorded.directory)])
    finally:
        (sums / "score.py").write_text(before)
    assert ran.exit_code == 1, ran.output
    assert "The first that differs is reward: sample 0: recorded" in ran.output
    ran = CliRunner().invoke(replay_command, [str(recorded.directory), "--no-rewards"])
    assert ran.exit_code == 0, ran.output
    assert "Nothing differs by more than rounding" in ran.output


def test_adapters_are_replayed(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    run = rlcore.train(recipe_of(tmp_path, lora={"rank": 4, "alpha": 8.0}, refit={"adapters": "merged"}), progress="silent")
    bundle = read_bundle(run.path / "bundles" / "step-000002")
    assert first_difference(replay(bundle).rows) is None
    found = replay(evolve(bundle, weights="model"), ["trainer.name=megatron"])
    assert first_difference(found.rows) is None, found.rows


@pytest.mark.parametrize("reuse", [1, 2])
def test_samples_of_older_weights_are_replayed(recipe_of: Callable[..., Any], tmp_path: Path, reuse: int) -> None:
    """Where a batch is used twice, the second of its steps trains on nothing else."""
    (tmp_path / "longer.py").write_text("def score(completion):\n    return float(len(completion))\n")
    recipe = recipe_of(
        tmp_path,
        environment={"function": {"path": f"{tmp_path / 'longer.py'}:score"}},
        **{"async": {"max_staleness": 1}},
        rollout={"max_response_tokens": 24, "reuse": reuse},
        training={"prompts_per_step": 8, "epochs_per_step": reuse},
    )
    run = rlcore.train(recipe, progress="silent")
    bundle = read_bundle(run.path / "bundles" / "step-000002")
    versions = bundle.sampled.batch.token_columns["weight_versions"]
    assert (versions[versions >= 0] < bundle.weight_version).any()
    rows = replay(bundle).rows
    assert first_difference(rows) is None, rows
    assert {row.verdict for row in rows if row.quantity.startswith("update 2:")} == {"equal"}


def test_tokens_of_older_weights_are_compared_where_these_are_kept(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "longer.py").write_text("def score(completion):\n    return float(len(completion))\n")
    recipe = recipe_of(
        tmp_path,
        environment={"function": {"path": f"{tmp_path / 'longer.py'}:score"}},
        **{"async": {"max_staleness": 2}},
        rollout={"max_response_tokens": 24},
        training={"prompts_per_step": 8},
        logging={"bundles_every_n_steps": 1, "bundle_weights": "model"},
        run={"num_steps": 5},
    )
    run = rlcore.train(recipe, progress="silent")
    bundles = [read_bundle(path) for path in sorted((run.path / "bundles").iterdir())]
    versions = [one.sampled.batch.token_columns["weight_versions"][one.sampled.batch.loss_mask] for one in bundles]
    number = next(number for number, own in enumerate(versions) if 0 < own.min() < bundles[number].weight_version)
    bundle, own = bundles[number], versions[number]
    rows = {row.quantity: row for row in replay(bundle, rewards=False).rows}
    generator = rows["generator's log-probabilities"]
    assert (generator.verdict, generator.count) == ("rounding", len(own)), generator
    before = next(one for one in bundles if one.weight_version == own.min())
    assert before.directory is not None
    before.directory.rename(tmp_path / "elsewhere")  # its tokens cannot be compared
    rows = {row.quantity: row for row in replay(bundle, rewards=False).rows}
    assert rows["generator's log-probabilities"].count == int((own > own.min()).sum())


def test_the_reference_is_the_runs_own_beginning(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, algorithm={"grpo": {"kl_coefficient": 0.1}})
    bundle = read_bundle(rlcore.train(recipe, progress="silent").path / "bundles" / "step-000002")
    rows = {row.quantity: row.verdict for row in replay(bundle).rows}
    assert rows["update 1: reference_logprobs"] == "equal"
    assert rows["update 2: loss"] == "equal"


def test_the_state_of_another_trainer_is_left_out(recorded: Bundle) -> None:
    found = replay(recorded, ["trainer.name=megatron"])
    assert first_difference(found.rows) is None, found.rows
    assert {row.verdict for row in found.rows if row.quantity.startswith("update 2:")} == {"not compared"}


def test_rounding_is_measured_beside_a_state_that_is_not_of_safetensors(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    """Megatron's holds the weights too, and would undo the changes from which rounding is measured."""
    recipe = recipe_of(tmp_path, trainer={"name": "megatron"}, model={"dtype": "bfloat16"}, run={"num_steps": 2})
    bundle = read_bundle(rlcore.train(recipe, progress="silent").path / "bundles" / "step-000002")
    found = replay(bundle, ["trainer.name=megatron", "training.max_tokens_per_microbatch=24"])
    assert first_difference(found.rows) is None, found.rows
    assert {"update 1: gradient norm", "update 2: gradient norm"} <= {
        row.quantity for row in found.rows if row.verdict == "rounding"
    }


@pytest.mark.parametrize("text", ["", "fsdp2:2", "fsdp2:ranks", "fsdp2:ranks=two", "fsdp2:ranks=0", ":ranks=2"])
def test_a_layout_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        layout_overrides(text)
    assert [problem.path for problem in error.value.problems] == ["--layout"]


@pytest.mark.wide
def test_a_layout_of_two_ranks_differs_by_rounding_alone(recorded: Bundle) -> None:
    found = replay(recorded, layout_overrides("fsdp2:ranks=2,tensor_parallel=2"))
    assert first_difference(found.rows) is None, found.rows
    rounded = {row.quantity for row in found.rows if row.verdict == "rounding"}
    assert {"update 2: log-probabilities", "update 2: gradient norm"} <= rounded


def test_a_dtype_that_no_trainer_has_is_refused_by_name(recorded: Bundle) -> None:
    ran = CliRunner().invoke(cli, ["replay", str(recorded.directory), "--dtype", "float8"])
    assert ran.exit_code not in (0, 1)
    assert 'model.dtype: found "float8"' in ran.output
    ran = CliRunner().invoke(cli, ["replay", str(recorded.directory), "--trainer", "megatron", "--dtype", "float64"])
    assert ran.exit_code not in (0, 1)
    assert "does not compute in float64 (model.dtype)" in ran.output


def test_a_step_without_weights_needs_their_directory(recorded: Bundle) -> None:
    bare = evolve(recorded, weights="none")
    with pytest.raises(ConfigError) as error:
        replay(bare)
    assert "--weights" in str(error.value)
    assert recorded.directory is not None
    found = replay(bare, weights=recorded.directory / "model")
    assert first_difference(found.rows) is None


def test_a_model_that_does_not_fit_is_refused(recorded: Bundle, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        replay(evolve(recorded, weights="none"), weights=tmp_path)
    assert f"{tmp_path}: found no config.json" in str(error.value)
