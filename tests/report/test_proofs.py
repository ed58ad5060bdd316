"""The page's table of bundles and receipts."""

import json
from pathlib import Path

from rlcore_report.data import report_data
from rlcore_report.page import page
from rlcore_report.proofs import proofs

from .made_runs import NASTY, make_run


def _put(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def _filled(run: Path) -> Path:
    """A run with two bundles and four receipts, some of them damaged."""
    files = {"arrays.safetensors": {"bytes": 2**20}, "texts.json": {"bytes": 2**19}}
    _put(run / "bundles/step-000003/bundle.json", {"files": files, "alarm": NASTY, "weights": "model"})
    _put(run / "bundles/step-000007/bundle.json", {"files": 3})
    agreed = {"trainer": {"mean": 1e-7}, "generation": None, "finding": ""}
    _put(run / "receipts/step-000003.json", agreed)
    _put(run / "receipts/step-000004.json", agreed | {"generation": {"mean": 0.25}, "finding": f"differs {NASTY}"})
    _put(run / "receipts/step-000005.json", {"failure": "no memory"})
    _put(run / "receipts/step-000006.json", [])
    return run


def test_each_step_has_its_bundle_and_its_receipt(tmp_path: Path) -> None:
    run = _filled(tmp_path)
    found = {one["step"]: one for one in proofs(run)}
    assert list(found) == [3, 4, 5, 6, 7]
    assert found[3]["bundle"] == {
        "path": str(run / "bundles/step-000003"),
        "name": "bundles/step-000003",
        "alarm": NASTY,
        "weights": "model",
        "mib": 1.5,
    }
    assert (found[3]["receipt"]["trainer"], found[3]["receipt"]["finding"]) == (1e-7, "")
    assert found[4]["bundle"] is None
    assert (found[4]["receipt"]["generation"], found[4]["receipt"]["finding"]) == (0.25, f"differs {NASTY}")
    assert found[5]["receipt"]["finding"] == "failed: no memory"
    assert found[6]["receipt"]["finding"].startswith("damaged: ")
    assert found[7]["bundle"]["alarm"].startswith("damaged: ")
    assert proofs(tmp_path / "empty") == []


def test_the_page_has_them_as_data_alone(tmp_path: Path) -> None:
    text = page(report_data([_filled(make_run(tmp_path / "run", 20))]), "report")
    told = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert [one["step"] for one in told["runs"][0]["proofs"]] == [3, 4, 5, 6, 7]
    assert NASTY not in text
