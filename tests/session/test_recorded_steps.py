"""A step of an own loop as a bundle: what it holds, what a replay names, and which steps are refused."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import rlcore
from rlcore.cli.main import cli
from rlcore.spi import CheckpointError, ConfigError, LossSpec, NonFiniteError
from rlcore_bundles.bisecting import bisect
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.compared_batch import batch_of
from rlcore_bundles.difference import first_difference
from rlcore_bundles.replay import replay
from rlcore_bundles.replaying import Start, plan_of
from rlcore_bundles.storage import read_bundle, write_bundle
from rlcore_session import CallError, Datum, Session
from rlcore_torchkit.digest import tensor_digest

from .conftest import OpenSession
from .session_support import FAKE_LOSS, open_fakes, recipe_of

PROMPTS = ["1+2=", "3+4="]
FSDP2 = {"trainer": {"name": "fsdp2"}, "run": {"device": "cpu"}}
SIX = Datum([1, 2, 3, 4, 5, 6])


def step(session: Session, seed: int, *, scale: float = 1.0, **settings: Any) -> None:
    """Make a step of policy gradients with advantages of both signs."""
    groups = session.sample(PROMPTS, num_samples=4, seed=seed)
    data = [Datum.of(one, advantages=scale * (-1.0) ** number) for group in groups for number, one in enumerate(group)]
    session.forward_backward(data, "clipped", config={"clip_high": 0.28}, temperature=0.9)
    session.optim_step(**settings)
    session.sync()


def record(model: Path, folder: Path, *, scale: float = 1.0, **sections: Any) -> Bundle:
    """The bundle of the second step of a session, with the trainer's state."""
    with rlcore.open(recipe_of(model, **{**FSDP2, **sections})) as session:
        step(session, 0)
        session.record(folder, weights="state")
        step(session, 1, scale=scale, max_grad_norm=0.5, betas=(0.8, 0.9))
    return read_bundle(folder)


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of fsdp2's."""
    return record(model, tmp_path_factory.mktemp("recorded") / "bundle")


@pytest.fixture
def fakes() -> Iterator[Session]:
    """A session of the fakes."""
    with ExitStack() as stack:
        yield stack.enter_context(open_fakes())


def with_column(bundle: Bundle, name: str, index: int, change: float) -> Bundle:
    """The bundle with another number at a loss token of a column."""
    column = bundle.trained.token_columns[name].copy()
    column[np.flatnonzero(bundle.trained.loss_mask)[index]] += change
    return evolve(bundle, trained=evolve(bundle.trained, token_columns={**bundle.trained.token_columns, name: column}))


def test_a_bundle_holds_the_step(recorded: Bundle) -> None:
    [update], calls = recorded.updates, recorded.own_step
    assert calls is not None
    assert recorded.directory is not None
    assert json.loads((recorded.directory / "bundle.json").read_text())["format"] == 2
    assert not [path for path in recorded.directory.rglob("*") if path.suffix in (".pkl", ".pt", ".bin")]
    assert (recorded.step, recorded.weight_version, recorded.weights) == (2, 1, "state")
    assert (calls.temperature, calls.settings.betas, calls.settings.max_grad_norm) == (0.9, (0.8, 0.9), 0.5)
    assert calls.settings.learning_rate is None
    assert update.loss_config["objective"] == "clipped"
    assert update.loss_config["clip_high"] == 0.28
    assert {"advantages", "generation_logprobs"} <= recorded.trained.token_columns.keys()
    assert update.gradient_norms is not None
    assert sum(norm**2 for norm in update.gradient_norms.values()) == pytest.approx(update.grad_norm**2, rel=1e-4)
    saved = load_file(recorded.directory / "model" / "model.safetensors")
    assert recorded.digests_before == {name: tensor_digest(one) for name, one in saved.items()}
    assert recorded.digests_after.keys() == recorded.digests_before.keys()
    assert recorded.digests_after != recorded.digests_before
    assert "torch" in recorded.environment["distributions"]


def test_a_replay_repeats_the_step_to_the_bit_and_leaves_rewards_out(recorded: Bundle) -> None:
    rows = {row.quantity: row for row in replay(recorded, ["trainer.name=fsdp2"]).rows}
    left = {name for name, row in rows.items() if row.verdict == "not compared"}
    assert left == {"prompt tokens", "reward", "generator's log-probabilities", "minibatches", "advantages"}
    assert {rows[name].reason for name in left} == {"the program's own loop made it"}
    assert {row.verdict for name, row in rows.items() if name not in left} == {"equal"}
    kinds = ("log-probabilities", "ratios", "loss", "gradient of a tensor", "gradient norm", "clip", "learning rate", "metrics")
    compared = ["weights before the step", *(f"update 1: {kind}" for kind in kinds), "weights after the step"]
    assert [name for name in rows if name not in left] == compared


@pytest.mark.parametrize("overrides", [["trainer.name=megatron"], ["trainer.name=fsdp2", "model.dtype=float64"]])
def test_another_trainer_or_dtype_differs_by_rounding_alone(recorded: Bundle, overrides: list[str]) -> None:
    rows = replay(recorded, overrides).rows
    assert first_difference(rows) is None, rows
    assert "rounding" in {row.verdict for row in rows if row.quantity.startswith("update 1:")}
    verdicts = {row.quantity: row.verdict for row in rows}
    assert {verdicts["update 1: gradient of a tensor"], verdicts["update 1: clip"]} <= {"equal", "rounding"}


def test_planted_faults_are_named(recorded: Bundle) -> None:
    advantage = with_column(recorded, "advantages", 0, 0.01)
    assert first_of(advantage) == ("update 1: loss", "the update")
    [update] = recorded.updates
    assert update.logprobs is not None
    place = int(np.flatnonzero(recorded.trained.loss_mask)[3])
    logprobs = update.logprobs.copy()
    logprobs[place] += 1e-4
    sequence = int(np.searchsorted(recorded.trained.offsets, place, side="right")) - 1
    where = f"sample {sequence}, token {place - int(recorded.trained.offsets[sequence])}"
    wrong = evolve(recorded, updates=[evolve(update, logprobs=logprobs)])
    assert first_of(wrong) == ("update 1: log-probabilities", where)
    norms = {**(update.gradient_norms or {})}
    tensor = sorted(norms)[2]
    norms[tensor] *= 1.001
    assert first_of(evolve(recorded, updates=[evolve(update, gradient_norms=norms)])) == (
        "update 1: gradient of a tensor",
        tensor,
    )


def test_a_changed_weight_is_named(recorded: Bundle, tmp_path: Path) -> None:
    assert recorded.directory is not None
    write_bundle(recorded, tmp_path / "bundle", lambda partial: copied(recorded.directory or partial, partial))
    file = tmp_path / "bundle" / "model" / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[0] += 0.01
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model/model\.safetensors"):
        read_bundle(tmp_path / "bundle")
    found = first_difference(replay(recorded, ["trainer.name=fsdp2"], weights=file.parent).rows)
    assert found is not None
    assert found.quantity == "weights before the step"
    assert found.where.endswith(f"the first {name}")


def copied(source: Path, target: Path) -> None:
    """Copy the folders of weights."""
    for name in ("model", "state"):
        shutil.copytree(source / name, target / name)


def first_of(bundle: Bundle) -> tuple[str, str]:
    """The first quantity that differs in a replay, and its place."""
    found = first_difference(replay(bundle, ["trainer.name=fsdp2"]).rows)
    assert found is not None
    return found.quantity, found.where.partition(": recorded")[0]


def test_demonstrations_without_weights_at_the_models_beginning(opened: OpenSession, tmp_path: Path) -> None:
    session = opened(**FSDP2)
    session.record(tmp_path / "bundle", weights="none")
    session.forward_backward([SIX, Datum([1, 2, 3], None, {})], "cross_entropy")
    session.optim_step()
    bundle = read_bundle(tmp_path / "bundle")
    assert (bundle.weights, bundle.weight_version) == ("none", 0)
    result = CliRunner().invoke(cli, ["replay", str(tmp_path / "bundle"), "--trainer", "fsdp2"])
    assert result.exit_code == 0, result.output
    assert "Nothing differs by more than rounding: every number is equal." in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


def test_a_step_that_fails_begins_anew_and_leaves_nothing(opened: OpenSession, tmp_path: Path) -> None:
    session = opened(**FSDP2)
    session.record(tmp_path / "bundle")
    with pytest.raises(NonFiniteError):
        session.forward_backward([Datum([1, 2, 3], None, {"weights": [0.0, 3e38, 3e38]})])
    assert session.weight_version == 0
    session.forward_backward([SIX])
    session.optim_step()
    session.forward_backward([SIX])
    session.optim_step()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    bundle = read_bundle(tmp_path / "bundle")
    assert (bundle.weight_version, bundle.trained.num_tokens) == (0, 6)
    session.record(tmp_path / "unfinished")
    session.forward_backward([SIX])
    session.close()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_dropout_is_refused(opened: OpenSession, tmp_path: Path) -> None:
    with pytest.raises(CallError, match=r"record: found lora\.dropout = 0\.5"):
        opened(lora={"rank": 2, "dropout": 0.5}, **FSDP2).record(tmp_path / "bundle")


def own_loss(logprobs: list[Any]) -> list[Any]:
    """A loss of a program."""
    return [np.zeros(len(one)) for one in logprobs]


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (own_loss, "own_loss"),
        (FAKE_LOSS, FAKE_LOSS.path),
        ("rlcore.testing.fakes.algorithm:fake_likelihood", "rlcore.testing.fakes.algorithm:fake_likelihood"),
    ],
    ids=["function", "spec", "path"],
)
def test_a_loss_of_the_programs_own_is_refused_by_name(fakes: Session, tmp_path: Path, loss: Any, name: str) -> None:
    fakes.record(tmp_path / "bundle")
    with pytest.raises(CallError) as error:
        fakes.forward_backward([SIX], loss)
    assert f"found '{name}' in a step that session.record writes" in str(error.value)
    assert "without session.record" in str(error.value)
    assert fakes.weight_version == 0
    assert not list(tmp_path.iterdir())


def test_other_calls_of_a_recorded_step_are_refused(opened: OpenSession, tmp_path: Path) -> None:
    session = opened(lora={"rank": 2}, **FSDP2)
    session.forward_backward([SIX])
    with pytest.raises(CallError, match="record: found"):
        session.record(tmp_path / "bundle")
    session.optim_step()
    session.record(tmp_path / "bundle")
    calls: dict[str, Callable[[], object]] = {
        "use_adapter": lambda: session.use_adapter("a", seed=1),
        "forward_backward_together": lambda: session.forward_backward_together({"": {"data": [SIX]}}),
    }
    for name, call in calls.items():
        with pytest.raises(CallError, match=f"{name}: found") as error:
            call()
        assert str(tmp_path / "bundle") in str(error.value)
    session.forward_backward([SIX])
    with pytest.raises(CallError, match="forward_backward: found call 2"):
        session.forward_backward([SIX])
    session.optim_step()
    rows = replay(read_bundle(tmp_path / "bundle"), ["trainer.name=fsdp2"]).rows
    assert first_difference(rows) is None, rows


def test_wrong_arguments_of_record(fakes: Session, tmp_path: Path) -> None:
    with pytest.raises(CallError) as error:
        fakes.record(tmp_path, weights="all")  # type: ignore[arg-type]
    assert "which is there" in str(error.value)
    assert "found 'all'" in str(error.value)


def test_a_bundle_that_names_code_is_refused(recorded: Bundle) -> None:
    [update] = recorded.updates
    wrong = evolve(recorded, updates=[evolve(update, loss="os:system")])
    with pytest.raises(CheckpointError, match="'os:system'"):
        replay(wrong)


def test_bisect_and_diff_name_an_input_and_refuse_or_list_other_calls(recorded: Bundle, model: Path, tmp_path: Path) -> None:
    data = record(model, tmp_path / "data", scale=2.0)
    found = bisect(recorded, data)
    assert (found.kind, list(found.components)) == ("inputs", ["column advantages"])
    [update] = data.updates
    other = evolve(data, updates=[evolve(update, loss_config={**update.loss_config, "clip_high": 0.3})])
    with pytest.raises(ConfigError, match=r"config.clip_high = 0.3, in the good one 0.28"):
        bisect(recorded, other)
    folder = str(recorded.directory)
    result = CliRunner().invoke(cli, ["diff", folder, str(tmp_path / "data")])
    assert result.exit_code == 1, result.output
    assert "The steps part in advantages: sample 0, token" in result.output
    equal = CliRunner().invoke(cli, ["diff", folder, folder, "--json"])
    assert equal.exit_code == 0, equal.output
    rows = json.loads(equal.output)["rows"]
    assert {row["verdict"] for row in rows} == {"equal"}
    assert [row["quantity"] for row in rows][:3] == ["weights before the step", "tokens", "advantages"]


def test_bisect_names_a_setting(model: Path, tmp_path: Path) -> None:
    bundles = []
    for rate in (1e-2, 2e-2):
        with rlcore.open(recipe_of(model, **FSDP2, optimizer={"learning_rate": rate})) as session:
            session.record(tmp_path / f"{rate}", weights="none")
            step(session, 0)
        bundles.append(read_bundle(tmp_path / f"{rate}"))
    found = bisect(bundles[0], bundles[1])
    assert (found.kind, list(found.components), found.quantity) == ("setting", ["learning rate"], "update 1: learning rate")
    result = CliRunner().invoke(cli, ["diff", *(str(one.directory) for one in bundles)])
    assert "optimizer.learning_rate" in result.output.partition("quantity")[0]
    assert "The steps part in update 1: learning rate" in result.output


def test_commands_on_runs_refuse_a_bundle_in_one_message(recorded: Bundle, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["diff", str(recorded.directory), str(tmp_path)])
    assert result.exit_code == 2
    assert "SECOND: found" in result.output
    assert "two bundles that sessions wrote" in result.output
    with pytest.raises(ConfigError, match="BUNDLE: found"):
        batch_of(recorded, None, {})


def test_a_replay_reads_no_reference(recorded: Bundle) -> None:
    plan = plan_of(recorded, Start.of(recorded), ())
    assert not plan.algorithm.needs.reference_logprobs


def test_losses_that_bundles_name_are_those_of_sessions() -> None:
    from rlcore_bundles.own_step import CROSS_ENTROPY
    from rlcore_session import loss_functions

    module, _, name = CROSS_ENTROPY.partition(":")
    assert (module, hasattr(loss_functions, name)) == (loss_functions.__name__, True)
    assert LossSpec(path=CROSS_ENTROPY, config=None).path == CROSS_ENTROPY
