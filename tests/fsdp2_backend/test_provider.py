"""The provider, found usable without importing anything heavy."""

import subprocess
import sys

from rlcore.spi import capabilities
from rlcore_fsdp2 import provider
from rlcore_fsdp2.config import Fsdp2Config


def test_provider_imports_nothing_heavy():
    code = (
        "import sys, rlcore_fsdp2.provider as p; p.PROVIDER.unavailable(); print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_usable_here():
    assert provider.PROVIDER.unavailable() is None


def test_log_probabilities_in_float8_are_not_exact():
    kept = [provider.PROVIDER.disabled_capabilities(Fsdp2Config(fp8=fp8)) for fp8 in (False, True)]
    assert kept == [frozenset(), {capabilities.EXACT_LOGPROBS}]
