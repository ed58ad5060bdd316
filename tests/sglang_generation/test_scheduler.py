"""The loader that SGLang calls in its processes, on a model of its form."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlcore.spi import tensor_digest
from rlcore_sglang.scheduler import LOADER, answer_file, load, order_tensor

from .sglang_doubles import FusedModel


def ordered(model: FusedModel, directory: Path, step: str, **details: str) -> dict[str, Any]:
    order = {"step": step, "answer": str(directory / "answer"), **details}
    load(model, [("order", order_tensor(order))])
    return json.loads(answer_file(directory / "answer", 0).read_text())


def test_what_no_tensor_fills_is_named(tmp_path: Path) -> None:
    model = FusedModel()
    assert ordered(model, tmp_path, "begin") == {}
    assert ordered(model, tmp_path, "end") == {"unfilled": ["fused", "norm"], "num_bytes": 21 * 4}
    save_file({"a.weight": torch.ones(2, 3), "norm.weight": torch.ones(3)}, tmp_path / "bucket")
    ordered(model, tmp_path, "bucket", file=str(tmp_path / "bucket"))
    assert ordered(model, tmp_path, "end")["unfilled"] == ["fused"], "half of it came"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digests_are_of_what_arrived(tmp_path: Path, dtype: torch.dtype) -> None:
    model, tensor = FusedModel(dtype), torch.randn(4, 3)
    save_file({"b.weight": tensor}, tmp_path / "bucket")
    answer = ordered(model, tmp_path, "bucket", file=str(tmp_path / "bucket"))
    assert answer == {"digests": {"b.weight": tensor_digest(tensor.numpy())}}
    torch.testing.assert_close(model.fused.data[2:], tensor.to(dtype))


def test_digests_are_also_of_what_is_held(tmp_path: Path) -> None:
    model = FusedModel()
    for name, tensor in {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4, 3), "norm.weight": torch.ones(3)}.items():
        save_file({name: tensor}, tmp_path / "bucket")
        ordered(model, tmp_path, "bucket", file=str(tmp_path / "bucket"))
    digests = {"fused": tensor_digest(model.fused.data.numpy()), "norm": tensor_digest(torch.ones(3).numpy())}
    assert ordered(model, tmp_path, "held") == {"digests": digests}


def test_an_error_is_an_answer(tmp_path: Path) -> None:
    answer = ordered(FusedModel(), tmp_path, "bucket", file=str(tmp_path / "nothing"))
    assert "nothing" in answer["error"]


def test_sglang_finds_the_loader_by_its_name() -> None:
    assert LOADER == "rlcore_sglang.scheduler.load"
