"""How episodes ended, in bundles."""

from collections import Counter
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.spi import CheckpointError, EpisodeFailure
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.storage import read_bundle, write_bundle


def test_a_bundle_keeps_how_each_episode_ended(recorded: Bundle, tmp_path: Path) -> None:
    failures: list[EpisodeFailure | None] = [None] * len(recorded.sampled.first_sequences)
    failures[3] = EpisodeFailure(kind="grader", reason="no verdict of prompt 3", masked=True)
    kept = evolve(recorded, sampled=evolve(recorded.sampled, failures=failures), weights="none")
    write_bundle(kept, tmp_path / "kept")
    write_bundle(evolve(kept, prompts="hashed"), tmp_path / "hashed")
    assert read_bundle(tmp_path / "kept").sampled.failures == failures
    assert read_bundle(tmp_path / "hashed").sampled.failures[3] == evolve(failures[3], reason="")
    write_bundle(evolve(kept, sampled=evolve(recorded.sampled, failures=failures[1:])), tmp_path / "short")
    with pytest.raises(CheckpointError) as error:
        read_bundle(tmp_path / "short")
    assert f"{len(failures) - 1} endings of {len(failures)} episodes" in str(error.value)


def test_a_run_records_how_its_episodes_ended(recorded: Bundle) -> None:
    """A limit of tokens cuts most answers of a random model."""
    kinds = Counter(one.kind for one in recorded.sampled.failures if one is not None)
    assert kinds["limit"] == int(recorded.sampled.truncated.sum()) > 0
