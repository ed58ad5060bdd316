"""What the provider says of itself, found out without importing torch or Megatron, and what `auto` makes of it."""

import subprocess
import sys
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.registry.selection import passed_over, select
from rlcore.spi import capabilities
from rlcore_fsdp2.provider import PROVIDER as FSDP2
from rlcore_megatron.provider import PROVIDER
from rlcore_megatron.setup.config import MegatronConfig

REGISTRY = Registry.from_providers({"trainer": [FSDP2, PROVIDER]})


def test_looking_at_it_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'megatron.core'}"
    code = (
        "import sys\nfrom rlcore_megatron.provider import PROVIDER\n"
        f"assert PROVIDER.unavailable() is None\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_auto_prefers_it_on_cuda_alone_and_naming_runs_it_on_a_cpu_too() -> None:
    assert select(REGISTRY, "trainer", "auto", device="cuda", needs={}).name == "megatron"
    assert select(REGISTRY, "trainer", "auto", device="cpu", needs={}).name == "fsdp2"
    assert select(REGISTRY, "trainer", "megatron", device="cpu", needs={}).name == "megatron"


def test_it_can_do_what_fsdp2_can() -> None:
    assert PROVIDER.capabilities | {capabilities.ADAPTERS_TOGETHER} == FSDP2.capabilities


def test_auto_says_that_it_took_fsdp2_and_why(installed) -> None:
    installed({"megatron-core": None})
    taken = select(REGISTRY, "trainer", "auto", device="cuda", needs={})
    assert passed_over(REGISTRY, taken, device="cuda", needs={}) == (
        "trainer 'fsdp2' (priority 50) is taken, as 'megatron' (priority 80) cannot be: "
        "megatron-core is not installed: pip install 'megatron-core<0.20,>=0.16.1'",
    )


@pytest.mark.parametrize(
    ("options", "is_exact"),
    [
        ({}, True),
        ({"transformer_engine": False, "transformer": {"moe_router_dtype": "fp64"}}, True),
        ({"fp8": True}, False),
        ({"transformer_engine": True}, False),
        ({"transformer": {"fp4": "e2m1"}}, False),
    ],
)
def test_log_probabilities_are_exact_unless_products_are_rounded(options: dict[str, Any], is_exact: bool) -> None:
    lost = set() if is_exact else {capabilities.EXACT_LOGPROBS}
    assert PROVIDER.disabled_capabilities(MegatronConfig(**options)) == lost
