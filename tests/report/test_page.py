"""One file that needs nothing else, and in which nothing that a run holds can do anything."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from rlcore_report.data import report_data
from rlcore_report.page import SCRIPTS, as_json, page

from .made_runs import NASTY, make_run

ASSETS = files("rlcore_report") / "assets"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Parsed(HTMLParser):
    """The elements of a page, and the texts of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text: str) -> None:
        self.texts.setdefault(self.tags[-1][0] if self.tags else "", []).append(text)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    return page(report_data([make_run(folder / name, 60) for name in ("one", "two")]), f"{NASTY}\udc80")


def test_texts_of_runs_are_no_elements(made: str) -> None:
    parsed = Parsed(made)
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    data = next(text for text in parsed.texts["script"] if text.startswith("{"))
    assert not re.search("[<>&]", data)
    told = json.loads(data)
    assert told["title"] == f"{NASTY}\ufffd"
    assert told["runs"][0]["samples"][0]["groups"][1]["prompt"] == f"{NASTY} 1"


def test_the_policy_allows_what_is_in_the_page_and_nothing_else(made: str) -> None:
    parsed = Parsed(made)
    policy = next(given["content"] for tag, given in parsed.tags if given.get("http-equiv") == "Content-Security-Policy")
    for kind in ("script", "style"):
        (text,) = (text for text in parsed.texts[kind] if not text.startswith("{") and text.strip())
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none';")
    assert not [given for _, given in parsed.tags if {"src", "href"} & given.keys()]


def test_scripts_set_texts_as_texts_and_ask_for_nothing() -> None:
    sources = "".join((ASSETS / name).read_text() for name in SCRIPTS)
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b(?!/)|Function\(|fetch\(|XMLHttp|import\("
    assert not re.findall(forbidden, sources)
    assert re.findall(r"https?://[^\"]*", sources) == ["http://www.w3.org/2000/svg"], "a name, at which nothing is asked"
    assert {path.name for path in ASSETS.iterdir() if path.name.endswith(".js")} == set(SCRIPTS)


def test_numbers_that_json_has_no_word_for_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        as_json({"a": float("nan")})


def test_a_long_run_makes_a_page_of_a_few_megabytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1000, every=100, num_figures=50, samples=64, tokens=500)
    assert len(page(report_data([run]), "long")) < 5e6


def drawn_by_chromium(text: str, folder: Path, width: int = 1200) -> str:
    """The page as a window of that width shows it."""
    (folder / "report.html").write_text(text, encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command = [str(CHROMIUM), *options, f"--window-size={width},900", f"file://{folder / 'report.html'}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


class Labels(HTMLParser):
    """The labels of drawings: the width of the drawing, and where the label begins and ends in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.width, self.label, self.found = 0.0, dict[str, str | None](), list[tuple[str, float, float, float]]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "svg":
            self.width = float(str(given["viewbox"]).split()[2])
        self.label = given if tag == "text" else {}

    def handle_data(self, text: str) -> None:
        if self.label and text != "×":
            x, length = float(str(self.label["x"])), 6.2 * len(text)  # of a digit in an axis's size
            begin = x - length * {"end": 1.0, "middle": 0.5}.get(str(self.label.get("text-anchor")), 0.0)
            self.found.append((text, begin, begin + length, self.width))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
@pytest.mark.parametrize("width", [480, 1200])
def test_labels_lie_within_their_drawings_and_shares_within_their_axes(tmp_path: Path, width: int) -> None:
    run = make_run(tmp_path / "run", 30)
    extreme = {"loss": -1.000001, "grad_norm": -1.2345e-7, "reward_mean": -123456.75, "eval/pass@1": 0.0}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changed = [
        line | {name: value * (1 + line["step"] * 1e-7) for name, value in extreme.items()} | {"step": 10**7 + line["step"]}
        for line in lines
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    drawn = drawn_by_chromium(page(report_data([run]), "report"), tmp_path, width)
    labels = Labels(drawn).found
    assert len(labels) > 50
    assert not [label for label in labels if label[1] < 0 or label[2] > label[3]]
    pass_at_1 = drawn.partition('aria-label="eval/pass@1"')[2].partition("</svg>")[0]
    assert re.findall(r'text-anchor="end">([^<]*)<', pass_at_1) == ["0", "0.5", "1"]
    widths = {
        float(found)
        for found in re.findall(r'viewBox="0 0 ([\d.]+) [\d.]+" role="img" aria-label="(?:seconds of a step|timeline)"', drawn)
    }
    assert widths, "drawings that stand alone are as wide as the window lets them be"
    assert max(widths) <= width


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
def test_a_browser_draws_all_of_it(made: str, tmp_path: Path) -> None:
    parsed = Parsed(drawn_by_chromium(made, tmp_path))
    texts = [text for tag, found in parsed.texts.items() if tag != "script" for text in found]
    assert any(text.startswith("Written by rlcore report") for text in texts), "the last thing that the script does"
    assert f"{NASTY} 1" in texts
    classes = [given.get("class") or "" for _, given in parsed.tags]
    assert sum("curve" in name for name in classes) >= 2 * 4, "a curve for each run and figure"
    groups = json.loads(Parsed(made).texts["script"][0])["runs"][0]["samples"][-1]["groups"][:2]
    num_tokens = sum(len(sample["logprobs"]) for group in groups for sample in group["samples"])
    assert sum(name.startswith("token") for name in classes) == num_tokens + len(
        ("above 0.9", "0.5", "0.1", "0.01", "less", "given")
    )
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert any("not finite" in text for text in texts)
    assert "NaN" not in "".join(str(value) for tag, given in parsed.tags if tag in ("path", "rect") for value in given.values())
