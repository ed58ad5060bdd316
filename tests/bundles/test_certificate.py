"""`rlcore certify`: what a run's directory proves, what it does not, and damaged directories."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.spi import CheckpointError
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.certificate.bundle_claims import replays
from rlcore_bundles.certificate.certificate import Certificate, certificate
from rlcore_bundles.certificate.command import certify_command
from rlcore_bundles.certificate.oracle import loss_in_float64, tolerance
from rlcore_bundles.storage import read_bundle, write_bundle

PAGE = Path(__file__).parents[2] / "docs" / "receipts.md"


def verdicts(found: Certificate) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in found.claims}


@pytest.fixture
def copied(receipted: Path, tmp_path: Path) -> Path:
    """A copy of a run with receipts and a bundle."""
    return Path(shutil.copytree(receipted, tmp_path / "run"))


def test_a_run_with_receipts_holds_every_proof(receipted: Path) -> None:
    found = certificate(receipted)
    expected = dict.fromkeys((claim.name for claim in found.claims), "held")
    assert verdicts(found) == expected | {"replays": "not recorded"}
    texts = {claim.name: claim.text for claim in found.claims}
    assert texts["receipts"].startswith("3 of 3 drawn steps; trainer: ")
    assert texts["versions of tokens"].endswith("at most 0 updates behind")
    assert texts["losses in float64"].startswith("2 updates, at most ")
    assert "4 versions" in texts["refits"]


def test_the_documents_table_has_every_claim(receipted: Path) -> None:
    table = PAGE.read_text().partition("| Claim | Holds where |")[2].partition("\n\n")[0]
    named = [name.strip() for line in table.splitlines()[2:] for name in line.split("|")[1].split(",")]
    assert sorted(named) == sorted(claim.name for claim in certificate(receipted).claims)


def test_a_run_without_receipts_says_what_was_not_recorded(finished: Path) -> None:
    found = verdicts(certificate(finished))
    assert [name for name, verdict in found.items() if verdict == "not recorded"] == [
        *("refits", "versions of tokens", "receipts", "replays")
    ]
    assert "not held" not in found.values()


def test_the_page_names_its_inputs_by_their_digests(receipted: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(certify_command, [str(receipted), "-o", str(tmp_path / "certificate.md")])
    assert (ran.exit_code, ran.output) == (0, f"{tmp_path / 'certificate.md'}: 12 held, 0 not held, 1 not recorded\n")
    page, record = (tmp_path / "certificate.md").read_text(), json.loads((tmp_path / "certificate.json").read_text())
    lines = page.partition("```text\n")[2].partition("```")[0]
    for line in lines.splitlines():
        digest, _, name = line.partition("  ")
        assert hashlib.sha256((receipted / name).read_bytes()).hexdigest() == digest
    assert f"`{hashlib.sha256(lines.encode()).hexdigest()}`" in page
    assert record["sha256"] == hashlib.sha256(lines.encode()).hexdigest()
    assert {"metrics.jsonl", "receipts/step-000002.json", "bundles/step-000002/bundle.json"} <= dict(record["inputs"]).keys()
    printed = CliRunner().invoke(certify_command, [str(receipted)])
    assert printed.output == page
    assert json.loads(CliRunner().invoke(certify_command, [str(receipted), "--json"]).output) == record


def test_bundles_are_replayed_where_the_command_asks(receipted: Path) -> None:
    claims = {claim.name: claim for claim in certificate(receipted, replays=True).claims}
    assert claims["replays"].verdict == "held", claims["replays"].text


def _edit(name: str, change: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(change((run / name).read_text()))


def _receipt(**changes: Any) -> Callable[[Path], object]:
    return _edit("receipts/step-000002.json", lambda text: json.dumps(json.loads(text) | changes))


def _line(name: str, number: int, **changes: Any) -> Callable[[Path], object]:
    def change(text: str) -> str:
        lines = text.splitlines()
        lines[number] = json.dumps(json.loads(lines[number]) | changes)
        return "".join(line + "\n" for line in lines)

    return _edit(name, change)


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "recipe is no TOML": (_edit("recipe.toml", lambda text: "[" + text), "recipe", "cannot be read"),
    "versions are no JSON": (_edit("environment.json", lambda _: "{"), "versions", "found no JSON"),
    "a line of metrics is none": (_edit("metrics.jsonl", lambda text: "x\n" + text), "metrics", "line 1: found 'x'"),
    "a step is missing": (_edit("metrics.jsonl", lambda text: "".join(text.splitlines(keepends=True)[1:])), "metrics", "1"),
    "a figure is not finite": (
        _edit("metrics.jsonl", lambda text: text.replace('"reward_mean": ', '"loss_x": NaN, "reward_mean": ', 1)),
        "metrics",
        "loss_x of step 1 is nan",
    ),
    "a refit is other weights": (
        _edit("receipts/refits.jsonl", lambda text: text + '{"version": 2, "num_tensors": 24, "sha256": "0"}\n'),
        "refits",
        "version 2 was sent with 2 different digests",
    ),
    "a refit is missing": (
        _edit("receipts/refits.jsonl", lambda text: "".join(text.splitlines(keepends=True)[1:])),
        "refits",
        "version 0 sampled tokens, and no refit brought it",
    ),
    "a refit is another than the bundle's": (
        _line("receipts/refits.jsonl", 1, sha256="0"),
        "refits",
        "step-000002 holds other digests of version 2",
    ),
    "refits are no JSON": (_edit("receipts/refits.jsonl", lambda text: "x\n" + text), "refits", "refits.jsonl, line 1"),
    "refits lack a key": (_line("receipts/refits.jsonl", 0, version=None), "refits", "cannot be read"),
    "a token is of a later version": (
        _line("receipts/steps.jsonl", 1, versions={"2": 100, "3": 24}, num_tokens=124),
        "versions of tokens",
        "step 2: 24 tokens of version 3, at version 2",
    ),
    "a token is too old": (
        _line("receipts/steps.jsonl", 1, versions={"2": 100, "0": 24}, num_tokens=124),
        "versions of tokens",
        "step 2: 24 tokens of version 0, at version 2",
    ),
    "a token has no version": (_line("receipts/steps.jsonl", 1, num_tokens=999), "versions of tokens", "step 2: 999 tokens"),
    "a receipt disagrees": (_receipt(finding="the trainer's differ"), "receipts", "step 2: the trainer's differ"),
    "a receipt failed": (_receipt(failure="no memory"), "receipts", "step 2 failed: no memory"),
    "a receipt is no JSON": (_edit("receipts/step-000002.json", lambda text: text[:40]), "receipts", "found no JSON"),
    "a receipt is another object": (_edit("receipts/step-000002.json", lambda _: "{}"), "receipts", "cannot be read"),
    "a bundle is cut": (
        _edit("bundles/step-000002/texts.json", lambda text: text[:-1]),
        "bundles",
        "texts.json: found",
    ),
    "a bundle's header is gone": (lambda run: (run / "bundles/step-000002/bundle.json").unlink(), "bundles", "no bundle.json"),
    "a checkpoint is damaged": (
        lambda run: (run / "checkpoints/step-000003/loop.json").write_text("{}"),
        "checkpoints",
        "step-000003",
    ),
    "generator and trainer differ": (
        _edit("metrics.jsonl", lambda text: text.replace('"token_mult_prob_error": ', '"token_mult_prob_error": 9', 1)),
        "generator and trainer agree",
        "above 2",
    ),
    "a ledger line is none": (lambda run: (run / "failures.jsonl").write_text("x\n"), "failures", "failures.jsonl, line 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_a_finding(copied: Path, damage: str) -> None:
    spoil, name, expected = DAMAGES[damage]
    spoil(copied)
    claims = {claim.name: claim for claim in certificate(copied).claims}
    assert claims[name].verdict == "not held"
    assert expected in claims[name].text
    ran = CliRunner().invoke(certify_command, [str(copied)])
    assert ran.exit_code == 1
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
    assert f"| {name} | not held |" in ran.output


def test_steps_from_before_receipts_are_not_recorded(copied: Path) -> None:
    file = copied / "receipts" / "steps.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    (copied / "receipts" / "step-000001.json").unlink()
    claims = {claim.name: claim for claim in certificate(copied).claims}
    assert claims["versions of tokens"].verdict == "not recorded"
    assert claims["versions of tokens"].text.endswith("nothing of 1 steps, the first 1")
    assert claims["receipts"].verdict == "held"
    assert claims["receipts"].text.startswith("2 of 3 drawn steps; none of step 1; ")


def test_failures_and_what_they_moved_are_counted(copied: Path) -> None:
    entries = [
        ("policy", "trained", 90, 6.0),
        ("tool", "trained", 3, 2.0),
        ("tool", "masked", 4, 5.0),
        ("grader", "dropped", 2, None),
    ]
    names = ("kind", "outcome", "episodes", "weight")
    lines = [{"step": step, "entries": [dict(zip(names, entry, strict=True))]} for step, entry in enumerate(entries)]
    (copied / "failures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    claims = {claim.name: claim for claim in certificate(copied).claims}
    assert (claims["failures"].verdict, claims["failures"].text) == (
        "held",
        "99 episodes, 2 by grader, 7 by tool; 25 % of the advantages trained on are theirs",
    )


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        certificate(tmp_path)
    assert "found no run" in str(error.value)


def test_the_loss_in_float64_is_that_of_every_update(recorded: Bundle) -> None:
    for number, update in enumerate(recorded.updates):
        found = loss_in_float64(recorded, number)
        assert isinstance(found, float)
        assert abs(found - update.loss_value) < tolerance(recorded) / 10
        assert update.logprobs is not None
        # The formula of GRPO's loss at the policy's first weights, by hand: the ratio of generator and trainer is 1.
        if number == 0:
            batch = recorded.trained.select(update.sequences)
            advantages = batch.token_columns["advantages"].astype(np.float64)[batch.loss_mask]
            assert found == pytest.approx(-advantages.sum() / update.num_loss_tokens, abs=1e-5)


def test_a_wrong_loss_does_not_hold(copied: Path, recorded: Bundle) -> None:
    first = recorded.updates[0]
    wrong = evolve(recorded, updates=[evolve(first, loss_value=first.loss_value + 1e-3), *recorded.updates[1:]], weights="none")
    write_bundle(wrong, copied / "bundles" / "step-000002")
    claims = {claim.name: claim for claim in certificate(copied).claims}
    assert claims["losses in float64"].verdict == "not held"
    assert claims["losses in float64"].text.startswith("update 1 of step-000002: recorded ")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"logprobs": None}, "returned no log-probabilities"),
        ({"loss": "os:system"}, "of no installed algorithm"),
        ({"loss": "rlcore_torchkit.rl.policy_gradient:nothing"}, "is not there"),
        ({"loss_config": {"entropy_coefficient": 0.1}}, "reads entropies"),
        ({"loss_config": {"kl_coefficient": "much"}}, "loss_config.kl_coefficient"),
    ],
)
def test_a_loss_that_cannot_be_computed_says_why(recorded: Bundle, changes: dict[str, Any], expected: str) -> None:
    found = loss_in_float64(evolve(recorded, updates=[evolve(recorded.updates[0], **changes)]), 0)
    assert expected in str(found)


@pytest.mark.parametrize("trusts", [False, True])
def test_code_of_a_model_is_executed_where_option_and_recipe_say_so(
    receipted: Path, monkeypatch: pytest.MonkeyPatch, trusts: bool
) -> None:
    given: list[list[str]] = []
    path = receipted / "bundles" / "step-000002"
    bundle = read_bundle(path)
    allowed = evolve(bundle, recipe=bundle.recipe.replace("trust_remote_code = false", "trust_remote_code = true"))

    def noted(bundle: Bundle, overrides: list[str], **options: Any) -> SimpleNamespace:
        given.append(overrides)
        return SimpleNamespace(rows=[])

    monkeypatch.setattr("rlcore_bundles.certificate.bundle_claims.replay", noted)
    for one in (bundle, allowed):
        monkeypatch.setattr("rlcore_bundles.certificate.bundle_claims.read_bundle", lambda _, one=one: one)
        replays(receipted, trusts, lambda _: None)
    assert given == [[], ["model.trust_remote_code=true"] if trusts else []]


def test_wrong_options_are_told_at_once(receipted: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(cli, ["certify", str(receipted), "--trust-remote-code", "-o", str(tmp_path / "page.json")])
    assert ran.exit_code == 2
    assert "2 problem(s) with the command line" in ran.output
