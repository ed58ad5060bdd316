"""`python -m rlcore_prometheus`: print the dashboard for Grafana."""

import sys
from importlib.resources import files

DASHBOARD = files("rlcore_prometheus") / "dashboard.json"

if __name__ == "__main__":
    sys.stdout.write(DASHBOARD.read_text(encoding="utf-8"))
