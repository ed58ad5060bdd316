"""`rlcore compare`: a recorded step beside a framework whose adapter is a stranger's package, and what the command refuses."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import evolve
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from rlcore.cli.main import cli
from rlcore.spi import ConfigError, PluginError
from rlcore.spi.errors import CheckpointError
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.compare_command import compare_command
from rlcore_bundles.compared_batch import batch_of
from rlcore_bundles.peer_process import call_adapter
from rlcore_bundles.storage import write_bundle

from .peer_cases import batch_of_case

ADAPTER = '''
"""An adapter of a framework that is REINFORCE with the mean of sequences."""
from rlcore_bundles.peers.contract import Peer, PeerError, overridden, require_parameters

INSTALL = "Run: {python} -m pip install acme-rl."

def peer(setup):
    if "broken" in setup.overrides:
        import acme_rl
    if "other" in setup.overrides:
        require_parameters("Acme 1.0", lambda rewards: None, ("rewards", "groups"))
    settings = overridden({"scale": 1.0}, setup.overrides, {"scale": 1.0})

    def advantages(samples):
        return samples.rewards - samples.rewards.mean()

    def loss(update):
        mask = update.mask.to(update.logprobs.dtype)
        per_token = -(update.logprobs - update.previous).exp() * update.advantages * mask
        if settings["scale"] == 3:
            raise ValueError("the scale is 3")
        value = settings["scale"] * (per_token.sum(1) / mask.sum(1)).mean()
        return value, {"acme/loss": float(value.detach())}

    return Peer(version="Acme 1.0", functions=["acme.loss"], settings=settings, unmapped=["clip_low: Acme clips nothing"],
                advantages=advantages, loss=loss)
'''


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A distribution with one adapter, which this process finds."""
    folder = tmp_path_factory.mktemp("site")
    package, information = folder / "acme_compare", folder / "acme_compare-1.0.dist-info"
    package.mkdir()
    information.mkdir()
    (package / "__init__.py").write_text("")
    (package / "adapter.py").write_text(ADAPTER)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-compare\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[rlcore.peers]\nacme = acme_compare.adapter:peer\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield


@pytest.fixture(scope="module")
def folder(recorded: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a run's second step, without weights."""
    place = tmp_path_factory.mktemp("bundles") / "bundle"
    write_bundle(evolve(recorded, weights="none"), place)
    return place


def compare(*arguments: object) -> Result:
    """Call the command."""
    return CliRunner().invoke(compare_command, [*map(str, arguments)])


@pytest.mark.usefixtures("acme")
def test_a_strangers_adapter_is_called_on_a_recorded_step(folder: Path) -> None:
    result = compare(folder, "--with", "acme", "--json")
    found = json.loads(result.output)
    rows = {row["quantity"]: row for row in found["rows"]}
    assert result.exit_code == 0, result.output
    assert found["framework"]["version"] == "Acme 1.0"
    assert rows["advantages"]["conventions"] == [
        'advantage_normalisation = "none", here "std"',
        'advantage_baseline = "batch_mean", here "group_mean"',
    ]
    assert rows["token weights"]["conventions"] == ['loss_normalisation = "sequence", here "token"']
    assert rows["log ratio"]["verdict"] in ("equal", "rounding")
    assert rows["policy loss"]["verdict"] == "differs"
    assert rows["policy loss"]["conventions"] == ["no clip of the ratio, here one"]


@pytest.mark.usefixtures("acme")
def test_the_table_names_conventions_settings_and_what_has_no_counterpart(folder: Path) -> None:
    options = ("advantage_normalisation=none", "loss_normalisation=sequence", "clip_low=1", "clip_high=inf")
    lines = compare(folder, "--with", "acme", "--set", "scale=0.5", *options).output.splitlines()
    assert lines[0] == "rlcore and Acme 1.0"
    assert "  scale = 0.5" in lines
    assert "  no counterpart: clip_low: Acme clips nothing" in lines
    assert any(line.startswith("Metrics without a counterpart: acme/loss ") for line in lines)
    assert '  1. advantage_baseline = "batch_mean", here "group_mean"' in lines
    assert "  2. tokens weigh 0.5 times what they do here" in lines
    assert lines[-1] == "With Acme 1.0, 4 of 9 terms are equal, 5 differ by a convention."


@pytest.mark.usefixtures("acme")
def test_an_error_of_the_framework_leaves_the_other_part(folder: Path) -> None:
    result = compare(folder, "--with", "acme", "--set", "scale=3")
    assert result.exit_code == 1
    assert "loss: Acme 1.0 failed: ValueError: the scale is 3 (adapter.py:" in result.output
    assert "advantages" in result.output


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("overrides", "arguments", "parts"),
    [
        ({"broken": "1"}, {}, ("does not import it: No module named 'acme_rl'", "-m pip install acme-rl", "--python")),
        ({"other": "1"}, {}, ("Acme 1.0: found ", "(rewards); expected the parameters groups too")),
        ({"colour": "1"}, {}, ("--set colour: found an option that the framework does not have; it has scale",)),
        ({}, {"python": Path("nowhere")}, ("--python: found nowhere, no such file",)),
        ({}, {"checkout": Path("nowhere")}, ("--checkout: found nowhere, no folder",)),
    ],
    ids=["missing", "another signature", "no such option", "no interpreter", "no checkout"],
)
def test_what_cannot_be_called_is_named(overrides: Any, arguments: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        call_adapter("acme", batch_of_case("grpo"), overrides, **arguments)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.usefixtures("acme")
def test_an_unknown_framework_names_those_with_an_adapter() -> None:
    with pytest.raises(PluginError) as raised:
        call_adapter("tlr", batch_of_case("grpo"), {})
    assert "expected a framework with an adapter: acme, nemo-rl, prime-rl, slime, trl, verl" in str(raised.value)


@pytest.mark.parametrize("peer", ["nemo-rl", "prime-rl", "slime"])
def test_a_framework_without_a_wheel_asks_for_its_sources(peer: str, tmp_path: Path) -> None:
    batch = batch_of_case("grpo")
    with pytest.raises(ConfigError) as raised:
        call_adapter(peer, batch, {}, checkout=tmp_path)
    assert f"in {tmp_path}; expected the folder of the framework's sources" in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        call_adapter(peer, batch, {})
    assert "name a checkout of github.com/" in str(raised.value)


def test_an_interpreter_that_ends_early_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho out of order >&2\nexit 4\n")
    script.chmod(0o755)
    with pytest.raises(PluginError) as raised:
        call_adapter("trl", batch_of_case("grpo"), {}, python=script)
    assert "ended with exit code 4" in str(raised.value)
    assert "out of order" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "arguments", "parts"),
    [
        (lambda one: evolve(one, updates=()), {}, ("found no update: the step had no signal",)),
        (lambda one: one, {"number": 5}, ("--update: found 5; expected an update of the step, from 1 to 2",)),
        (
            lambda one: evolve(one, trained=evolve(one.trained, token_columns={})),
            {"number": 7},
            ("found no advantages", "--update: found 7"),
        ),
        (
            lambda one: evolve(one, updates=[evolve(each, loss="mine:loss") for each in one.updates]),
            {},
            ("found the loss mine:loss; expected a step of an algorithm with rlcore_torchkit.rl",),
        ),
        (lambda one: one, {"changes": {"colour": 1}}, ("colour: found no such option; expected an option of the algorithm",)),
        (
            lambda one: one,
            {"changes": {"ratio": "word", "clip_low": "x"}},
            ("ratio: found 'word'; expected one of token", "clip_low"),
        ),
    ],
    ids=["no update", "no such update", "no advantages", "another loss", "no such option", "wrong values"],
)
def test_a_bundle_that_cannot_be_compared_is_refused_with_every_reason(
    recorded: Bundle, change: Callable[[Bundle], Bundle], arguments: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        batch_of(change(recorded), arguments.get("number"), arguments.get("changes", {}))
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("options", "part", "reason"),
    [
        ({"kl_placement": "reward"}, "advantages", "the KL divergence is taken off the rewards"),
        ({"reward_aggregation": "normalise_then_sum"}, "advantages", "reward components are normalised one by one"),
        ({"objective": "clip_cov"}, "loss", 'the objective "clip_cov" chooses tokens by chance or over the step'),
        ({"entropy_minimum": 0.5}, "loss", "entropy_minimum reads entropies, which no bundle has"),
        ({"kl_coefficient": 0.1}, "loss", "the bundle has no log-probabilities of the reference"),
    ],
)
def test_a_part_that_the_bundle_cannot_give_has_its_reason(
    recorded: Bundle, options: dict[str, Any], part: str, reason: str
) -> None:
    updates = [evolve(one, loss_config={**one.loss_config, **options}) for one in recorded.updates]
    batch = batch_of(evolve(recorded, updates=updates), None, {})
    assert batch.reasons == {part: reason}


def test_a_step_without_the_policys_log_probabilities_still_has_advantages(recorded: Bundle) -> None:
    updates = [evolve(one, logprobs=None) for one in recorded.updates]
    batch = batch_of(evolve(recorded, updates=updates), None, {})
    assert batch.reasons.keys() == {"loss"}
    assert batch.own.samples is not None


def test_the_batch_is_the_recorded_one(recorded: Bundle) -> None:
    batch = batch_of(recorded, 2, {})
    update, own = recorded.updates[1], batch.own
    assert own.update is not None
    value, metrics = own.loss(own.update)
    assert float(value) == pytest.approx(update.loss_value, rel=1e-5, abs=1e-7)
    assert metrics["clip_fraction"] == pytest.approx(update.metrics["clip_fraction"], abs=1e-6)
    again = evolve(own, recorded=None).advantages()
    assert float((again - own.advantages()).abs().max()) < 1e-6


def test_a_first_update_says_that_no_clip_acts_and_moving_makes_one_act(recorded: Bundle) -> None:
    still = batch_of(recorded, 1, {})
    assert "Every ratio is 1" in still.notes[0]
    moved = batch_of(recorded, 1, {}, moved_by=1.0).own
    assert moved.update is not None
    assert moved.loss(moved.update)[1]["clip_fraction"] > 0


def _trl_dump(path: Path, rewards: list[float], scale: float = 1e-4) -> None:
    import numpy as np

    grouped = np.array(rewards).reshape(2, -1)
    advantages = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + scale)
    table = {
        "step": [3] * len(rewards),
        "prompt": ["a"] * grouped.shape[1] + ["b"] * grouped.shape[1],
        "completion": ["x"] * len(rewards),
        "accuracy": rewards,
        "advantage": advantages.reshape(-1).tolist(),
    }
    pq.write_table(pa.table(table), path)


def test_trls_own_dump_is_compared_without_trl(tmp_path: Path) -> None:
    path = tmp_path / "completions_00003.parquet"
    _trl_dump(path, [0.0, 1.0, 0.25, 0.5, 1.0, 0.0, 0.125, 0.75])
    result = compare("--with", "trl", "--from", path)
    assert result.exit_code == 0, result.output
    assert "1. advantage_epsilon = 0.0001, here 1e-06" in result.output
    assert "Not in the dump: token ids, loss masks, and the log-probabilities" in result.output.replace("\n", " ")
    equal = compare("advantage_epsilon=1e-4", "--with", "trl", "--from", path)
    assert "With completions_00003.parquet, 1 of 1 terms are equal." in equal.output


@pytest.mark.usefixtures("acme")
def test_verls_dump_gives_the_rewards_and_the_framework_the_advantages(tmp_path: Path) -> None:
    path = tmp_path / "7.jsonl"
    rows = [
        {"input": f"p{number // 2}", "output": "x", "gts": "y", "score": score, "step": 7}
        for number, score in enumerate((0.0, 1.0, 0.5, 0.75))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = compare("--with", "acme", "--from", path, "--json")
    found = json.loads(result.output)
    assert found["rows"][0]["count"] == 4
    assert "advantages" in found["notes"][0]
    assert found["rows"][1]["reason"].startswith("the dump does not hold token ids")


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.txt", "x", "expected TRL's completions_STEP.parquet or verl's STEP.jsonl"),
        ("a.jsonl", "{", "line 1: found no JSON"),
        ("a.jsonl", '{"input": "x"}', "expected output, score too"),
        ("a.jsonl", '{"input": "x", "output": "y", "score": "high"}', "found no number as score in line 1"),
        ("a.jsonl", "", "found no sample"),
        ("a.parquet", "x", "Parquet"),
    ],
)
def test_a_file_that_is_no_dump_is_refused(tmp_path: Path, name: str, content: str, part: str) -> None:
    (tmp_path / name).write_text(content)
    result = compare("--with", "trl", "--from", tmp_path / name)
    assert isinstance(result.exception, CheckpointError)
    assert part in str(result.exception)


def test_the_command_takes_a_bundle_or_a_dump() -> None:
    assert "expected either BUNDLE" in compare("--with", "trl").output
    assert compare("--with", "trl", os.devnull, "--from", os.devnull).exit_code == 2


@pytest.mark.parametrize("command", ["compare", "diff", "replay"])
def test_an_exit_code_of_a_comparison_is_no_unexpected_error(
    command: str, folder: Path, finished: Path, recorded: Bundle, tmp_path: Path
) -> None:
    batch = recorded.sampled.batch
    columns = {**batch.token_columns, "generation_logprobs": batch.token_columns["generation_logprobs"] / 0.9}
    changed = evolve(recorded, sampled=evolve(recorded.sampled, batch=evolve(batch, token_columns=columns)))
    shutil.copytree(finished, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    altered = [json.dumps({**json.loads(line), "reward_mean": 9.0}) for line in lines]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(altered) + "\n")
    arguments: dict[str, list[object]] = {
        # The framework is there, and fails.
        "compare": [folder, "--with", "trl", "--python", _failing(tmp_path)],
        "diff": [finished, tmp_path / "run"],
        "replay": [tmp_path / "bundle", "--no-rewards"],
    }
    write_bundle(evolve(changed, weights="none", weight_version=0), tmp_path / "bundle")
    result = CliRunner().invoke(cli, [command, *map(str, arguments[command])])
    assert result.exit_code == 1
    assert "unexpected" not in result.output


def _failing(folder: Path) -> Path:
    """An interpreter that answers as an adapter whose framework has failed."""
    answer = {"version": "X", "functions": [], "settings": {}, "unmapped": [], "metric_names": {}, "metrics": {}}
    failed = {"loss": "Error: it broke", "advantages": "Error: it broke"}
    text = json.dumps({**answer, "reasons": failed, "failures": failed})
    script = folder / "python"
    save_file({}, folder / "empty.safetensors")
    copies = f"cp {folder}/empty.safetensors $last/answer.safetensors"
    script.write_text(f"#!/bin/sh\nfor last; do :; done\n{copies}\necho '{text}' > $last/answer.json\n")
    script.chmod(0o755)
    return script
