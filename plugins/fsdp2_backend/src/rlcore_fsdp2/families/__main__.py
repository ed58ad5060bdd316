"""`python -m rlcore_fsdp2.families`: try every family, and write the table."""

import sys

from rlcore_fsdp2.families.command import main

if __name__ == "__main__":
    sys.exit(main())
