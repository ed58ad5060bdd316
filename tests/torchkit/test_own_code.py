"""Code that comes with a model: transformers copies it to where it imports it from, and several ranks ask for it at once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CONFIG = """
from transformers import Qwen3Config


class OwnConfig(Qwen3Config):
    model_type = "own"
"""
MODEL = """
# The first half of the file has no class.
# ........................................
# ........................................
# ........................................
from transformers import Qwen3ForCausalLM
from .own_config import OwnConfig


class Own(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
RANK = """
import fcntl, shutil, sys, time
from pathlib import Path
import torch
from rlcore.spi import ModelSpec
from rlcore_torchkit.huggingface.models import load_model

rank, model, marks = sys.argv[1], sys.argv[2], Path(sys.argv[3])
copy, lock = shutil.copyfile, fcntl.flock


def wait_for(*wanted):
    deadline = time.monotonic() + 300
    while not any((marks / mark).exists() for mark in wanted) and time.monotonic() < deadline:
        time.sleep(0.01)


def locked(file, how):
    if how == fcntl.LOCK_EX:  # after LOCK_NB was refused
        (marks / "waits").touch()
    return lock(file, how)


def in_halves(source, target):
    (marks / "begun").touch()
    wait_for("copied", "waits")
    content = Path(source).read_bytes()
    Path(target).write_bytes(content[: len(content) // 2])
    (marks / "half").touch()
    wait_for("loaded", "waits")
    return copy(source, target)


def at_once(source, target):
    copied = copy(source, target)
    (marks / "copied").touch()
    wait_for("half")
    return copied


own = {"slow": in_halves, "quick": at_once}[rank]
shutil.copyfile = lambda source, target: (own if Path(target).name == "own_model.py" else copy)(source, target)
if rank == "quick":
    fcntl.flock = locked
    wait_for("begun")
spec = ModelSpec(path=model, trust_remote_code=True)
print(type(load_model(spec, dtype=torch.float32, device="meta", any_decoder=True)).__name__)
(marks / "loaded").touch()
"""


def test_no_rank_imports_what_another_has_copied_half_of(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """The one has seen that the module is not there, and begins to copy it once the other has done so."""
    model, marks = tmp_path / "model", tmp_path / "marks"
    shutil.copytree(model_directory("qwen3"), model)
    marks.mkdir()
    (model / "own_config.py").write_text(CONFIG)
    (model / "own_model.py").write_text(MODEL)
    named = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own_model.Own"}
    config = json.loads((model / "config.json").read_text())
    own = {"model_type": "own", "architectures": ["Own"], "auto_map": named}
    (model / "config.json").write_text(json.dumps(config | own))
    variables = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, rank, str(model), str(marks)], stdout=subprocess.PIPE, text=True, env=variables
        )
        for rank in ("slow", "quick")
    ]
    assert [rank.communicate()[0] for rank in ranks] == ["Own\n", "Own\n"]
