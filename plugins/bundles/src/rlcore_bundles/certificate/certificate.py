"""Makes the certificate of a run from its directory alone."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from attrs import frozen

from rlcore import __version__
from rlcore.run.storage.saved_run import SavedRun
from rlcore_bundles.certificate import bundle_claims, receipt_claims, run_claims
from rlcore_bundles.certificate.claims import Claim, Judgement, judged, missing
from rlcore_bundles.file_digests import sha256_of

INPUTS = (
    *("recipe.toml", "recipe-*.toml", "environment.json", "metrics.jsonl", "summary.json", "schedule.jsonl"),
    *(run_claims.FAILURES, "receipts/*.json", "receipts/*.jsonl", "bundles/*/bundle.json", "checkpoints/*/manifest.json"),
)
"""The files that a certificate is made of. The digests of a bundle's other files, and of a checkpoint's, are in these."""

Judge: TypeAlias = Callable[[Path], Judgement]
JUDGES: Mapping[str, tuple[str, Judge]] = {
    "recipe": ("sha256sum RUN/recipe.toml", run_claims.recipe),
    "versions": ("cat RUN/environment.json", run_claims.versions),
    "model": ("cat RUN/checkpoints/*/loop.json", run_claims.model),
    "metrics": ("rlcore report RUN", run_claims.metrics),
    "refits": ("cat RUN/receipts/refits.jsonl", receipt_claims.refits),
    "versions of tokens": ("cat RUN/receipts/steps.jsonl", receipt_claims.token_versions),
    "receipts": ("cat RUN/receipts/step-*.json", receipt_claims.receipts),
    "generator and trainer agree": ("rlcore report RUN", run_claims.mismatch),
    "losses in float64": ("rlcore certify RUN --json", bundle_claims.losses),
    "bundles": ("ls RUN/bundles", bundle_claims.bundles),
    "checkpoints": ("cat RUN/checkpoints/*/manifest.json", run_claims.checkpoints),
    "failures": ("rlcore failures RUN", run_claims.failures),
}
"""The command that shows each claim, and the function that judges it."""


@frozen(kw_only=True)
class Certificate:
    """The claims about a run, and the digest of what they were made of."""

    run: str
    version: str
    """The version of rlcore that judged."""
    claims: Sequence[Claim]
    inputs: Sequence[tuple[str, str]]
    """Each file with its SHA-256, by name."""
    sha256: str
    """The SHA-256 over the lines `SHA-256  NAME` of the inputs, as sha256sum prints them."""


def certificate(
    run: Path, *, replays: bool = False, trusts: bool = False, tell: Callable[[str], None] = lambda _: None
) -> Certificate:
    """Judge a run by its directory. `replays`: its bundles are computed again. `trusts`: code of a model is then
    executed, where the recipe allows it. CheckpointError where there is no run."""
    path = SavedRun.find(run).path
    claims = [judged(name, command, judge, path) for name, (command, judge) in JUDGES.items()]
    again: Judge = partial(bundle_claims.replays, trusts=trusts, tell=tell) if replays else _not_replayed
    claims.insert(list(JUDGES).index("checkpoints"), judged("replays", "rlcore certify RUN --replay", again, path))
    inputs = inputs_of(path)
    lines = "".join(f"{digest}  {name}\n" for name, digest in inputs)
    return Certificate(
        run=str(path), version=__version__, claims=claims, inputs=inputs, sha256=hashlib.sha256(lines.encode()).hexdigest()
    )


def inputs_of(run: Path) -> list[tuple[str, str]]:
    """The files that a certificate is made of, each with its SHA-256."""
    found = {path for pattern in INPUTS for path in run.glob(pattern) if path.is_file()}
    return [(str(path.relative_to(run)), sha256_of(path)) for path in sorted(found)]


def _not_replayed(run: Path) -> Judgement:  # noqa: ARG001 - the form of a judge
    return missing("--replay computes the bundles again")
