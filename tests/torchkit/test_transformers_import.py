"""What making and loading a model imports besides: nothing that no option asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOADS = """
import os, sys
from pathlib import Path
import torch
from rlcore.spi import ModelSpec
from rlcore_torchkit.testing.models import make_model
from rlcore_torchkit.huggingface.models import load_model

folder = Path(sys.argv[1])
if not os.fork():
    make_model(folder)
    print("made, torchao" if "torchao" in sys.modules else "made", flush=True)
    os._exit(0)
os.wait()
load_model(ModelSpec(path=str(folder), dtype="float32"), dtype=torch.float32, device="meta")
print("loaded, torchao" if "torchao" in sys.modules else "loaded")
import torchao
print(torchao.VALUE)
"""


def test_torchao_is_left_alone_and_can_still_be_imported(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    information = tmp_path / "site" / "torchao-9.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 9.0\n")
    (information.parent / "torchao.py").write_text("VALUE = 'as before'\n")
    path = os.pathsep.join([str(information.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.stdout.split("\n")[:3] == ["made", "loaded", "as before"]
