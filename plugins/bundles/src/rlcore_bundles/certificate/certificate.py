"""Makes the certificate of a run from its directory alone."""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from attrs import frozen

from rlcore import __version__
from rlcore.run.storage.saved_run import SavedRun
from rlcore_bundles.certificate import bundle_claims, receipt_claims, run_claims
from rlcore_bundles.certificate.claims import Claim, judged, missing
from rlcore_bundles.file_digests import sha256_of

INPUTS = (
    *("recipe.toml", "recipe-*.toml", "environment.json", "metrics.jsonl", "summary.json", "schedule.jsonl"),
    *(run_claims.FAILURES, "receipts/*.json", "receipts/*.jsonl", "bundles/*/bundle.json", "checkpoints/*/manifest.json"),
)
"""The files that a certificate is made of. The digests of a bundle's other files, and of a checkpoint's, are in these."""


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


def certificate(run: Path, *, replays: bool = False, tell: Callable[[str], None] = lambda _: None) -> Certificate:
    """Judge a run by its directory. `replays`: its bundles are computed again. CheckpointError where there is no run."""
    path = SavedRun.find(run).path
    judges: dict[str, Callable[[Path], Claim]] = {
        "recipe": run_claims.recipe,
        "versions": run_claims.versions,
        "model": run_claims.model,
        "metrics": run_claims.metrics,
        "refits": receipt_claims.refits,
        "versions of tokens": receipt_claims.token_versions,
        "receipts": receipt_claims.receipts,
        "generator and trainer agree": run_claims.mismatch,
        "losses in float64": bundle_claims.losses,
        "bundles": bundle_claims.bundles,
        "replays": partial(bundle_claims.replays, tell=tell) if replays else _not_replayed,
        "checkpoints": run_claims.checkpoints,
        "failures": run_claims.failures,
    }
    claims = [judged(name, f"rlcore certify {path}", judge, path) for name, judge in judges.items()]
    inputs = inputs_of(path)
    lines = "".join(f"{digest}  {name}\n" for name, digest in inputs)
    return Certificate(
        run=str(path), version=__version__, claims=claims, inputs=inputs, sha256=hashlib.sha256(lines.encode()).hexdigest()
    )


def inputs_of(run: Path) -> list[tuple[str, str]]:
    """The files that a certificate is made of, each with its SHA-256."""
    found = {path for pattern in INPUTS for path in run.glob(pattern) if path.is_file()}
    return [(str(path.relative_to(run)), sha256_of(path)) for path in sorted(found)]


def _not_replayed(run: Path) -> Claim:
    return missing("replays", "--replay computes the bundles again", f"rlcore certify {run} --replay")
