"""`python -m rlcore_vllm.families`: try every family, and write the table."""

import sys

from rlcore_torchkit.testing.families.engine_command import main
from rlcore_vllm.families.tried import TriedVllm

if __name__ == "__main__":
    sys.exit(main(TriedVllm))
