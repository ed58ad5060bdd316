"""Counts the files of rlcore that a generated token passes between the generator's answer and the loss, and its copies.

A script, since a process that was traced before may never end under a profile, in Python 3.11."""

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import GenerateResult, TokenBatch, Turn
from rlcore_torchkit.testing.models import make_model

FORWARD = "rlcore_torchkit/head/logprobs.py"
"""The file of the models' forward pass. What it makes of a microbatch, such as targets, is no column."""
FIRST = ("rlcore_torchkit/generation.py", "join_samples")
LAST = ("rlcore_torchkit/rl/policy_gradient.py", "policy_gradient_loss")
"""The first and the last function, by file: the one that makes an answer, and the loss."""
RECORDS = (GenerateResult, TokenBatch, Turn)
"""Types that carry tokens from one function to the next."""
MAX_TOKENS = 8
RECIPE = """
[run]
num_steps = 1
[model]
path = "model"
[algorithm]
name = "grpo"
grpo.kl_coefficient = 0.1
[environment]
name = "arithmetic"
[trainer]
name = "fsdp2"
[generator]
name = "transformers"
[training]
prompts_per_step = 2
[rollout]
samples_per_prompt = 2
max_prompt_tokens = 32
max_response_tokens = MAX_TOKENS
[sinks]
names = []
[checkpoint]
at_end = false
[logging]
rollouts_every_n_steps = 0
""".replace("MAX_TOKENS", str(MAX_TOKENS))


class Walk:
    """Follows the first sample that is as long as it may be, from the answer to the end of the first loss.

    A file touches the tokens where its code reads them from a record, or one of its frames holds them itself: as an array,
    a tensor, a list of numbers or a list of these, among its arguments and variables or as what it returns. A file that hands
    on a record alone is not counted, whatever is in it: it need not change when tokens look otherwise.
    """

    def __init__(self, root: Path) -> None:
        self.roots = tuple(str(root / folder) for folder in ("core/src", "torchkit/src", "plugins"))
        self.sample: bytes | None = None
        self.logprobs: bytes | None = None
        self.ended = False
        self.touched: set[str] = set()
        self.gathered: dict[str, dict[int, Any]] = {"tokens": {}, "logprobs": {}}
        """Arrays that hold the sample's part of a column, by its address; kept, so that no address is used twice."""

    def note(self, frame: FrameType) -> None:
        """Count the file of a frame, where it is one of rlcore's."""
        file = frame.f_code.co_filename
        if self.sample is not None and not self.ended and file.startswith(self.roots):
            self.touched.add(file.partition("/src/")[2])

    def is_sample(self, value: Any) -> bool:
        """Return whether a value holds the sample's tokens as a run."""
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_floating_point():
            value = value.detach().numpy()
        if isinstance(value, list | tuple):
            if not (value and all(type(item) is int for item in value)):
                return any(self.is_sample(item) for item in value if isinstance(item, list | np.ndarray | torch.Tensor))
            value = np.asarray(value)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "i":
            return False
        return self.sample is not None and self.sample in np.ascontiguousarray(value, np.int32).tobytes()

    def gather(self, value: Any) -> None:
        """Note where a value holds the sample's tokens or log-probabilities: records, mappings and sequences are searched."""
        if isinstance(value, TokenBatch):
            value = [value.tokens, value.token_columns]
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, list | tuple):
            for item in value:
                self.gather(item)
            return
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dtype in (torch.int32, torch.float32):
            value = value.detach().numpy()
        if not isinstance(value, np.ndarray) or value.ndim != 1 or not value.flags.c_contiguous:
            return
        for column, dtype, run in (("tokens", np.int32, self.sample), ("logprobs", np.float32, self.logprobs)):
            if value.dtype == dtype and run is not None and (start := value.tobytes().find(run)) >= 0:
                self.gathered[column].setdefault(value.ctypes.data + start, value)

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Handle an event of sys.setprofile."""
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if self.ended or event not in ("call", "return") or not file.startswith(self.roots):
            return
        if self.sample is None:
            if event == "return" and (file.partition("/src/")[2], name) == FIRST and argument is not None:
                longest = int(np.argmax(np.diff(argument.offsets)))
                part = slice(*argument.offsets[longest : longest + 2].tolist())
                if part.stop - part.start == MAX_TOKENS:  # a few tokens may stand elsewhere too
                    self.sample = np.asarray(argument.tokens[part], np.int32).tobytes()
                    self.logprobs = argument.logprobs[part].tobytes()
                    self.note(frame)
            return
        if any(self.is_sample(value) for value in (*frame.f_locals.values(), argument)):
            self.note(frame)
        if file.partition("/src/")[2] != FORWARD:
            self.gather([*frame.f_locals.values(), argument])
        if event == "return" and (file.partition("/src/")[2], name) == LAST:
            self.ended = True  # and never False again: another thread may be here too


class Read:
    """A record's field, which notes the frame that reads it."""

    def __init__(self, field: Any, walk: Walk) -> None:
        self.field, self.walk = field, walk

    def __get__(self, record: Any, owner: type) -> Any:
        self.walk.note(sys._getframe(1))
        return self.field.__get__(record, owner)

    def __set__(self, record: Any, value: Any) -> None:
        self.field.__set__(record, value)


@contextmanager
def followed(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Watch every frame, in all threads, and every read of a record's tokens."""
    for record in RECORDS:
        owner = next(cls for cls in record.__mro__ if "tokens" in vars(cls))
        monkeypatch.setattr(owner, "tokens", Read(vars(owner)["tokens"], walk))
    threading.setprofile(walk.profile)
    sys.setprofile(walk.profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        monkeypatch.undo()


def main(root: Path, directory: Path) -> None:
    """Train in an empty directory, and print what the walk found."""
    make_model(directory / "model", "qwen3", alphabet="0123456789+-=? ", max_length=64)
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE)
    plan = prepare(recipe, [f"run.directory={directory / 'runs'}", "run.device=cpu"])
    walk = Walk(root)
    with pytest.MonkeyPatch.context() as monkeypatch, followed(walk, monkeypatch):
        train(plan, resume=False, progress=Progress())
    gathered = {column: len(arrays) for column, arrays in walk.gathered.items()}
    print(json.dumps({"ended": walk.ended, "touched": sorted(walk.touched), "gathered": gathered}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
