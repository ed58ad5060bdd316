"""The section `[lora]`."""

import pytest

from rlcore.schema.structure import structure
from rlcore.spi import LoraSpec


def test_the_scale_is_pefts() -> None:
    assert LoraSpec(rank=8, alpha=4.0).scale == 0.5


@pytest.mark.parametrize(
    ("table", "path"),
    [
        ({"rank": 0}, "lora.rank"),
        ({"alpha": 0.0}, "lora.alpha"),
        ({"dropout": 1.0}, "lora.dropout"),
        ({"targets": []}, "lora.targets"),
        ({"targets": [""]}, "lora.targets"),
        ({"targets": ["q_proj", "q_proj"]}, "lora.targets"),
        ({"targets": ["q_proj", "all-linear"]}, "lora.targets"),
        ({"init_from": " "}, "lora.init_from"),
    ],
)
def test_values_out_of_range_are_refused(table: dict[str, object], path: str) -> None:
    _, problems = structure(table, LoraSpec, "lora")
    assert [problem.path for problem in problems] == [path]
