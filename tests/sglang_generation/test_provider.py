"""What the provider says of itself, with sections that round."""

from typing import Any

import pytest

from rlcore_sglang.config import SglangConfig
from rlcore_sglang.provider import EXACT, PROVIDER


@pytest.mark.parametrize("engine", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}, {"torchao_config": "int4wo-32"}])
def test_fewer_bits_take_exactness_away(engine: dict[str, Any]) -> None:
    assert PROVIDER.disabled_capabilities(SglangConfig(engine=engine)) == EXACT


def test_what_rounds_nothing_leaves_it() -> None:
    assert PROVIDER.disabled_capabilities(SglangConfig(engine={"chunked_prefill_size": 64})) == frozenset()
