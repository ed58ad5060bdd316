"""The trainers' tests' helpers, which compare with plain transformers and torch, and the blocks of the documents."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
for folder in (
    TESTS / "fsdp2_backend",
    TESTS / "megatron_backend",
    TESTS / "docs",
):  # losses are imported from there by their paths too
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
