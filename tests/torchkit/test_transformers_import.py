"""What making and loading a model imports besides: nothing that no option asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.spi import PluginError
from rlcore_torchkit import transformers_import

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


@pytest.mark.parametrize(
    ("library", "remedy"),
    [
        ("torchvision", "pip uninstall torchvision"),
        ("torchaudio", "pip uninstall torchaudio"),
        ("safetensors", "`rlcore doctor`"),
    ],
)
def test_a_library_that_breaks_the_import_of_transformers_is_named_with_its_remedy(
    library: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_models.py").write_text(f"import {library}\n")
    (tmp_path / f"{library}.py").write_text("raise RuntimeError('operator a::nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, library, raising=False)
    monkeypatch.setattr(transformers_import, "MODULES", ("acme_models",))
    with pytest.raises(PluginError) as raised:
        transformers_import.import_transformers()
    told = str(raised.value)
    assert told.startswith("transformers cannot be imported: RuntimeError: operator a::nms does not exist")
    assert remedy in told


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0"), ("1", "1")])
def test_huge_pages_are_asked_for_unless_the_user_decided(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(transformers_import.HUGE_PAGES, given or "")  # undone in the end, as a removal alone would not be
    if given is None:
        monkeypatch.delenv(transformers_import.HUGE_PAGES)
    transformers_import.import_transformers()
    assert os.environ[transformers_import.HUGE_PAGES] == expected
