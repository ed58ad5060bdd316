"""The fields that are not to be set, against those that Megatron's classes have."""

import inspect

from rlcore_megatron.checks.passthrough_check import NEEDS_ENGINE, NEEDS_FP8
from rlcore_megatron.checks.reserved_keys import NEWER_KEYS, RESERVED_KEYS
from rlcore_megatron.setup.passthrough import TABLES, fields_of, megatron_class, recipe_type

OBJECTS = {
    *("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
    *("_cpu_offloading_context", "quant_recipe", "moe_grad_scale_func", "mtp_grad_scale_func"),
    "experimental_attention_variant_loss_scale_func",
}
"""Fields that hold functions and other objects, which no recipe can write."""
OLDER = {"moe_extended_tp", "moe_use_legacy_grouped_gemm", "muon_use_nesterov", "preserve_fp32_weights"}
"""Those that Megatron-Core 0.19 has no more."""


def test_what_the_table_of_what_is_not_to_be_set_names_is_there() -> None:
    for table in TABLES:
        fields = inspect.signature(megatron_class(table)).parameters
        absent = RESERVED_KEYS[table].keys() - fields.keys()
        assert absent <= OLDER or absent <= NEWER_KEYS[table].keys(), table
    fields = fields_of(megatron_class("transformer")).keys()
    assert {*NEEDS_ENGINE, *NEEDS_FP8} <= fields - RESERVED_KEYS["transformer"].keys()


def test_every_field_that_can_be_set_can_be_described() -> None:
    for table in TABLES:
        for name, annotation in fields_of(megatron_class(table)).items():
            if name not in RESERVED_KEYS[table]:
                assert recipe_type(annotation) is not None or name in OBJECTS, name
