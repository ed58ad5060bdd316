"""The worst samples, as a file."""

from pathlib import Path

import numpy as np
import pandas

from rlcore.spi import GENERATION_LOGPROBS, WEIGHT_VERSIONS, TokenBatch
from rlcore.testing.fakes import FakeTokenizer
from rlcore_report.mismatch_report import save_logprob_mismatch
from rlcore_report.worst_samples import WorstSamples


def test_a_group_that_an_algorithm_dropped_is_missing(tmp_path: Path) -> None:
    batch = TokenBatch(
        tokens=np.arange(1, 601, dtype=np.int32) % 31 + 1,
        offsets=np.array([0, 600], np.int64),
        loss_mask=np.arange(600) > 2,
        token_columns={GENERATION_LOGPROBS: np.full(600, -1000.0, np.float32), WEIGHT_VERSIONS: np.zeros(600, np.int32)},
    )
    worst = WorstSamples.of(batch, np.full(600, -1.0, np.float32), 0)
    path = save_logprob_mismatch(tmp_path / "logprob_mismatch", 1, "heading", worst, FakeTokenizer())
    table = pandas.read_parquet(path)
    assert table["group"].isna().all()
    assert np.isfinite(table["token_mult_prob_error"]).all()
    assert max(map(len, path.with_suffix(".txt").read_text().splitlines())) < 450
