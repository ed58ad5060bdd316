"""The drawings of docs/diagrams are what website/diagrams.py draws, and pages show each."""

import importlib.util
from xml.etree import ElementTree

import pytest
from markdown_blocks import DOCUMENTS, ROOT

FOLDER = ROOT / "docs" / "diagrams"


def script():
    spec = importlib.util.spec_from_file_location("website_diagrams", ROOT / "website" / "diagrams.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawings_are_current():
    expected = {f"{name}.svg": draw().svg() for name, draw in script().DRAWINGS.items()}
    assert {path.name: path.read_text() for path in FOLDER.glob("*.svg")} == expected, "run website/diagrams.py"


def test_boxes_lie_within_the_picture():
    for path in FOLDER.glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        width, height = (float(root.get(side)) for side in ("width", "height"))
        for box in root.iter("{http://www.w3.org/2000/svg}rect"):
            right = float(box.get("x", 0)) + float(box.get("width"))
            assert right <= width, path.name
            assert float(box.get("y", 0)) + float(box.get("height")) <= height, path.name


def test_a_page_shows_each():
    text = "".join(path.read_text() for path in DOCUMENTS)
    assert [path.name for path in FOLDER.glob("*.svg") if f"diagrams/{path.name})" not in text] == []


def test_rooms_stand_above_those_that_they_import():
    arrows = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set(), "beside": {"bottom"}}
    assert script().levels(arrows) == {"bottom": 0, "middle": 1, "beside": 1, "top": 2}
    assert script().shortest(arrows) == [("beside", "bottom"), ("middle", "bottom"), ("top", "middle")]


def test_a_circle_of_imports_is_refused():
    with pytest.raises(ValueError, match="one, other$"):
        script().levels({"one": {"other"}, "other": {"one", "third"}, "third": set()})
