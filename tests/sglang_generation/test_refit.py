"""Refits by files that the loader reads, in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlcore.spi import RefitError, WeightExport
from rlcore_conformance.references.tensors import corrupt_value, drop_tensor, make_export, repeat_tensor
from rlcore_sglang.config import SglangConfig
from rlcore_sglang.refit import Refit

from .sglang_doubles import FusedModel, LocalEngine


@pytest.fixture(params=["shared_memory", "directory"])
def refit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Refit]:
    one = Refit(request.param, FusedModel.shapes, SglangConfig(refit_directory=str(tmp_path)))
    yield one
    one.close()
    assert list(tmp_path.iterdir()) == []


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in FusedModel.shapes.items()}


def export(tensors: dict[str, torch.Tensor], **options: object) -> WeightExport:
    return make_export(tensors, 1, max_bucket_bytes=1, **options)


def test_all_tensors_arrive_bucket_by_bucket(refit: Refit) -> None:
    model, engine = FusedModel(), LocalEngine(FusedModel())
    engine.model = model
    for _ in range(2):
        tensors = weights()
        held = refit.run(engine, export(tensors))
        assert held.digests.keys() == tensors.keys()
        assert held.num_bytes == 21 * 4
        torch.testing.assert_close(model.fused.data, torch.cat([tensors["a.weight"], tensors["b.weight"]]))
    assert engine.calls[:7] == ["begin_update", "begin", "bucket", "bucket", "bucket", "end", "end_update"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (corrupt_value, r"changed on the way, by their digests: norm\.weight"),
        (drop_tensor, r"missing from the buckets: norm\.weight"),
        (repeat_tensor, r"repeated: a\.weight"),
    ],
)
def test_a_stream_that_is_not_what_it_promised(refit: Refit, change: object, message: str) -> None:
    with pytest.raises(RefitError, match=message):
        refit.run(LocalEngine(FusedModel()), export(weights(), change=change))


def test_tensors_of_another_model_are_refused_before_anything_changes(refit: Refit) -> None:
    engine, tensors = LocalEngine(FusedModel()), weights()
    for wrong, message in (
        ({"a.weight": tensors["a.weight"]}, r"missing from what the trainer exports: b\.weight, norm\.weight"),
        ({**tensors, "c.weight": torch.ones(1)}, r"unknown to the model: c\.weight"),
        ({**tensors, "a.weight": torch.ones(3, 2)}, r"a\.weight has shape"),
    ):
        with pytest.raises(RefitError, match=message):
            refit.run(engine, export(wrong))
    assert engine.calls == []


def test_a_tensor_that_sglang_skips_is_an_error(refit: Refit) -> None:
    model = FusedModel()
    model.skips = {"b.weight"}
    with pytest.raises(RefitError, match=": fused"):
        refit.run(LocalEngine(model), export(weights()))


def test_a_rank_without_an_answer_is_an_error(refit: Refit) -> None:
    engine = LocalEngine(FusedModel())
    engine.is_silent = True
    with pytest.raises(RefitError, match=r"'begin'"):
        refit.run(engine, export(weights()))
