"""The documents' modules on the path, and the package of docs/plugins.md, installed."""

import sys
from pathlib import Path

# Test files are imported one by one, so that a module which they share has to be found by its folder.
sys.path.insert(0, str(Path(__file__).parent))
