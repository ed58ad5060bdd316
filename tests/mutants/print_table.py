"""`make mutants`: each fault planted between the parts, and the test that finds it; exit code 1 where one survives."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.mutants.faults import FAULTS
from tests.mutants.planting import serving


def main() -> int:
    """Print the table."""
    width = max(len(fault.name) for fault in FAULTS)
    survivors = 0
    with serving() as server, tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(FAULTS):
            own = Path(folder) / str(number)
            own.mkdir()
            outcome = server.judge(fault.module, fault.line, fault.planted, fault.killer, own)
            survivors += outcome.verdict != "killed"
            print(f"{fault.name:<{width}}  {fault.module:<32}  {outcome.verdict:<8}  {fault.killer}", flush=True)
    print(f"{len(FAULTS) - survivors} of {len(FAULTS)} faults are found")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
