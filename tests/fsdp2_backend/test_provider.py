"""The provider, found usable without importing anything heavy."""

import subprocess
import sys

from rlcore_fsdp2 import provider


def test_provider_imports_nothing_heavy():
    code = (
        "import sys, rlcore_fsdp2.provider as p; p.PROVIDER.unavailable(); print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_usable_here():
    assert provider.PROVIDER.unavailable() is None
