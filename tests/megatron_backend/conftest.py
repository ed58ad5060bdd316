"""What the Megatron trainer's tests import: their helpers, and the reference that the other trainer is compared with."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "fsdp2_backend"):  # imported here, by loss paths and by spawned workers
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
