"""README's figures stand in the section of docs/benchmarks.md that each row links to; ratios there follow from the seconds."""

import re
from collections.abc import Iterator

import pytest
from markdown_blocks import ROOT, anchor_of

BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|[.,]\d)")
LINK = re.compile(r"\[[^]]*\]\([^)]*\)")
CODE = re.compile(r"`[^`]*`")


def rows_of(text: str) -> Iterator[list[str]]:
    """The cells of each row of a table that `text` begins with, but for its heading."""
    for line in re.match(r"(?:\|.*\n)+", text)[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def section(anchor: str) -> str:
    """A section of docs/benchmarks.md, by what a viewer calls its heading."""
    (found,) = (
        part
        for part in re.split(r"^(?=##+ )", BENCHMARKS, flags=re.MULTILINE)
        if anchor_of(part.splitlines()[0].lstrip("# ")) == anchor
    )
    return found


def readme_rows() -> Iterator[tuple[str, str, list[str]]]:
    """The name of each row, the anchor of its section, and its figures."""
    readme = (ROOT / "README.md").read_text()
    anchor = ""
    for name, *cells in rows_of(readme[readme.index("| Benchmark | Figure |") :]):
        anchor = next(iter(re.findall(r"docs/benchmarks\.md#([^)]*)", name)), anchor)
        assert name.startswith(("[", "The same, "))
        yield name, anchor, NUMBER.findall(CODE.sub("", LINK.sub("", " ".join(cells))))


@pytest.mark.parametrize(("name", "anchor", "figures"), list(readme_rows()))
def test_a_rows_figures_stand_in_the_section_that_it_links_to(name: str, anchor: str, figures: list[str]) -> None:
    measured = set(NUMBER.findall(section(anchor).replace("**", "")))
    assert len(figures) >= 2
    assert not [figure for figure in figures if figure not in measured], (
        "README and docs/benchmarks.md differ: one was measured"
    )


def test_ratios_of_the_step_on_cpu_follow_from_its_seconds() -> None:
    table = section("a-grpo-step-on-cpu-benchmarkscpu_steppy")
    rows = list(rows_of(table[table.index("| case |") :].replace("**", "")))
    assert [row[1] for row in rows] == ["rlcore", "TRL", "bare loop"] * 3
    for first in range(0, len(rows), 3):
        case = rows[first : first + 3]
        seconds = [float(row[2]) for row in case]
        for row, own in zip(case, seconds, strict=True):
            # Medians of the turns' ratios are not quite the ratios of the medians.
            assert [float(cell) for cell in row[3:5]] == pytest.approx([own / seconds[1], own / seconds[2]], abs=0.025)


def test_the_row_in_8_bits_tells_of_its_mismatch_and_of_the_limit_that_lets_it_pass() -> None:
    (name,) = (name for name, _, _ in readme_rows() if "8 bits" in name)
    told = re.findall(r"`([\w.]+)=([\d.]+)`", name)
    assert told == [("training.max_token_mult_prob_error", "1000")]
    assert "`training.max_token_mult_prob_error=1000`" in BENCHMARKS
    (mismatch,) = re.findall(r"`token_mult_prob_error`\)? (?:is|of) ([\d.]+ to [\d.]+)", name)
    assert f"`token_mult_prob_error` is {mismatch} in 8 bits" in BENCHMARKS


def test_the_first_screen_has_ratios_of_the_table() -> None:
    readme = (ROOT / "README.md").read_text()
    ((cpu, gpu),) = re.findall(r"([\d.]+) of TRL's time on two CPU cores and ([\d.]+) on one H200", readme)
    assert f"two cores, one update | {cpu} × TRL" in readme
    assert f"one H200 | 12.2 s, {gpu} × TRL" in readme


def test_the_demos_accuracies_stand_in_the_table_of_its_runs() -> None:
    """The page that README links to is the only one with accuracies of several seeds."""
    ((before, after),) = re.findall(r"from ([\d.]+) to ([\d.]+) on two CPU cores", (ROOT / "README.md").read_text())
    text = (ROOT / "docs" / "curves.md").read_text()
    demo = list(rows_of(text[text.index("| | Date | Seed 0 | Seed 1 | Seed 2 |") :]))
    assert [row[2] for row in demo[:2]] == [before, after]
    accuracies = {cell for row in demo for cell in row[3:]}
    for page in (ROOT / "README.md", ROOT / "docs" / "megatron.md"):
        assert not accuracies & set(NUMBER.findall(page.read_text())), "link to docs/curves.md"
