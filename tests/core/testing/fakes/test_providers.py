"""What the fakes need."""

import subprocess
import sys


def test_the_fakes_need_neither_torch_nor_pytest():
    build = "import sys, rlcore.testing; from rlcore.testing.fakes import fake_registry; fake_registry()"
    code = f"{build}; assert not {{'torch', 'transformers', 'pytest', 'ray'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
