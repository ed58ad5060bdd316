"""The tables for Megatron's own classes: which fields those have, and what values become."""

from typing import Any

import pytest
import torch

from rlcore.spi import ConfigError
from rlcore_megatron.setup.passthrough import converted, fields_of, megatron_class, table_problems


def test_an_empty_table_stays_empty() -> None:
    assert converted({}, dict) == {}


@pytest.mark.parametrize(
    ("table", "values", "made"),
    [
        (
            "transformer",
            {
                "moe_router_dtype": "fp64",
                "moe_aux_loss_coeff": [0.001, 1],
                "attention_backend": "flash",
                "recompute_modules": ["mlp"],
            },
            {"moe_router_dtype": "fp64", "moe_aux_loss_coeff": [0.001, 1.0], "recompute_modules": ["mlp"]},
        ),
        (
            "transformer",
            {"window_size": [128, 0], "autocast_dtype": "bfloat16"},
            {"window_size": (128, 0), "autocast_dtype": torch.bfloat16},
        ),
        ("optimizer", {"exp_avg_dtype": "bfloat16", "decoupled_lr": 1}, {"exp_avg_dtype": torch.bfloat16, "decoupled_lr": 1.0}),
        ("scheduler", {"lr_decay_style": "WSD", "wsd_decay_steps": 5}, {"lr_decay_style": "WSD", "wsd_decay_steps": 5}),
        ("ddp", {"overlap_grad_reduce": True, "bucket_size": 4096}, {"overlap_grad_reduce": True, "bucket_size": 4096}),
    ],
)
def test_values_become_what_megatron_wants(table: str, values: dict[str, Any], made: dict[str, Any]) -> None:
    found = converted(values, megatron_class(table))
    assert found.keys() == values.keys()
    assert made.items() <= found.items()
    assert all(type(found[key]) is type(value) for key, value in made.items())


def test_the_first_alternative_that_takes_a_value_makes_it() -> None:
    class Mine:
        def __init__(self, nested: list, scope: list[str] | list[torch.dtype], dtype: torch.dtype | None): ...

    table = {"nested": [["a"], {"b": 1}], "scope": ["float32"], "dtype": "float32"}
    assert converted(table, Mine) == {**table, "dtype": torch.float32}


def test_enums_go_by_their_names() -> None:
    from megatron.core.transformer.enums import AttnBackend

    assert converted({"attention_backend": "flash"}, megatron_class("transformer")) == {"attention_backend": AttnBackend.flash}


def test_what_was_not_checked_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError) as raised:
        converted({"overlap_grad_reducce": True}, megatron_class("ddp"))
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("DistributedDataParallelConfig.overlap_grad_reducce", "an unknown key")
    assert problem.remedy == "Did you mean overlap_grad_reduce?"


def test_a_class_of_ones_own_is_judged_by_its_annotations() -> None:
    class Mine:
        def __init__(self, owner: "Mine", size: int = 1, name: str | None = None) -> None: ...

    assert fields_of(Mine) == {"size": int, "name": str | None}
    assert list(table_problems({"size": 1, "name": "a"}, Mine, "x")) == []
    assert [problem.path for problem in table_problems({"size": True, "name": 2, "owner": 1}, Mine, "x")] == [
        "x.size",
        "x.name",
        "x.owner",
    ]
