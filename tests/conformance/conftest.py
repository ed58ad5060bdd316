"""Trainers of several ranks are launched from a server that has imported what the other tests of ranks need too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "megatron_backend"))
sys.path.insert(0, str(Path(__file__).parent.parent / "fsdp2_backend"))
sys.path.insert(0, str(Path(__file__).parent.parent / "openai_generation"))

import rank_launch  # noqa: F401 - names what the server imports
