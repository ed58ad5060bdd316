"""`python -m rlcore_sglang.families`: try every family, and write the table."""

import sys

from rlcore_sglang.families.tried import TriedSglang
from rlcore_torchkit.testing.families.engine_command import main

if __name__ == "__main__":
    sys.exit(main(TriedSglang))
