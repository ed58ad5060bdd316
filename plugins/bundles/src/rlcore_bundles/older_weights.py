"""Log-probabilities of tokens that older weights than those of the step sampled, with these weights where they are kept."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import evolve

from rlcore.reading import parse_toml, read_json
from rlcore.spi import WEIGHT_VERSIONS
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.header import HEADER
from rlcore_bundles.replaying import Replayed, Start, plan_of, policy_logprobs
from rlcore_bundles.storage import MODEL


def older_starts(bundle: Bundle) -> dict[int, Start]:
    """The weights of each older version that sampled tokens of a bundle, as far as they are kept: those of version 0 are the
    recipe's model, others are in bundles beside this one."""
    batch = bundle.sampled.batch
    versions = np.unique(batch.token_columns[WEIGHT_VERSIONS][batch.loss_mask])
    wanted = {int(one) for one in versions if one < bundle.weight_version}
    recipe = parse_toml(bundle.recipe)
    own, has_adapters = str(recipe["model"]["path"]), "lora" in recipe
    found: dict[int, Start] = {}
    if 0 in wanted and Path(own).is_dir():
        found[0] = Start(model=own)
    beside = [] if bundle.directory is None or not wanted else sorted(bundle.directory.parent.glob(f"*/{HEADER}"))
    for header, folder in ((read_json(path), path.parent / MODEL) for path in beside):
        version = header.get("weight_version")
        if version in wanted and folder.is_dir() and parse_toml(header["recipe"])["run"] == recipe["run"]:
            found[version] = Start(model=own if has_adapters else str(folder), adapters=folder if has_adapters else None)
    return found


def with_older_weights(
    bundle: Bundle,
    again: Replayed,
    starts: Mapping[int, Start],
    overrides: Sequence[str],
    tell: Callable[[str], None],
) -> Replayed:
    """The replay with the log-probabilities of tokens of older weights too."""
    versions = bundle.sampled.batch.token_columns[WEIGHT_VERSIONS]
    logprobs = again.sampled_logprobs
    for version, start in sorted(starts.items()):
        tell(f"log-probabilities of the tokens that weight version {version} sampled")
        logprobs = np.where(versions == version, policy_logprobs(bundle, plan_of(bundle, start, overrides)), logprobs)
    return evolve(again, sampled_logprobs=logprobs, versions=again.versions | starts.keys())
