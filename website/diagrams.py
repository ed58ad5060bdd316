"""Draw docs/diagrams/*.svg: boxes, arrows between them, and bars over time. A test keeps them current."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import permutations
from pathlib import Path
from xml.sax.saxutils import escape

import grimp

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "diagrams"
STYLE = "font-family='sans-serif' font-size='13' fill='#222'"
FILLS = {
    "core": "#e8eaf6",
    "plugin": "#fff3e0",
    "data": "#e8f5e9",
    "train": "#ffe0b2",
    "generate": "#c5cae9",
    "refit": "#cfd8dc",
}


class Drawing:
    """An SVG picture, built up piece by piece."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            "<svg xmlns='http://www.w3.org/2000/svg' role='img' "
            f"viewBox='0 0 {width} {height}' width='{width}' height='{height}'>",
            f"<title>{escape(title)}</title>",
            "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
            "<path d='M0 0 8 4 0 8z' fill='#555'/></marker></defs>",
            f"<rect width='{width}' height='{height}' fill='#fff'/>",
        ]

    def box(self, x: int, y: int, width: int, height: int, kind: str, *lines: str) -> None:
        """A box with centred lines of text, the first of them bold."""
        self._parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='5' fill='{FILLS[kind]}' stroke='#888'/>"
        )
        top = y + height / 2 - 8 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * number, line, "middle", bold=number == 0)

    def text(self, x: float, y: float, line: str, anchor: str = "start", *, bold: bool = False) -> None:
        weight = " font-weight='bold'" if bold else ""
        self._parts.append(f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' {STYLE}{weight}>{escape(line)}</text>")

    def arrow(self, *points: tuple[int, int], dashed: bool = False) -> None:
        """A line through points, with a head at its end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dashes = " stroke-dasharray='4 3'" if dashed else ""
        self._parts.append(
            f"<polyline points='{path}' fill='none' stroke='#555' stroke-width='1.3'{dashes} marker-end='url(#head)'/>"
        )

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def step() -> Drawing:
    """What a step of the loop does, and who does it."""
    picture = Drawing(760, 250, "A step: prompts, samples, rewards, advantages, update, refit")
    for x, width, kind, *lines in (
        (10, 120, "data", "Data", "prompts"),
        (165, 130, "plugin", "Generator", "samples and", "log-probabilities"),
        (330, 130, "plugin", "Environment", "rewards,", "or the next turn"),
        (495, 120, "plugin", "Algorithm", "advantages,", "and the loss"),
        (650, 100, "plugin", "Trainer", "updates"),
    ):
        picture.box(x, 60, width, 80, kind, *lines)
    for start, end in ((130, 165), (295, 330), (460, 495), (615, 650)):
        picture.arrow((start, 100), (end, 100))
    picture.arrow((395, 60), (395, 30), (230, 30), (230, 60), dashed=True)
    picture.text(312, 22, "several turns", "middle")
    picture.arrow((700, 140), (700, 200), (230, 200), (230, 140))
    picture.text(465, 192, "refit: the new weights reach the generator", "middle")
    picture.text(465, 222, "each token keeps the version of the weights that sampled it", "middle")
    return picture


def plugins() -> Drawing:
    """How plugins are found and bound."""
    picture = Drawing(760, 290, "From installed packages to a run")
    for y, name, what in (
        (10, "rlcore-fsdp2", "trainer fsdp2, 50"),
        (78, "rlcore-megatron", "trainer megatron, 80"),
        (146, "rlcore-vllm", "generator vllm, 80"),
        (214, "acme-vowels", "environment vowels"),
    ):
        picture.box(10, y, 170, 54, "plugin", name, what)
        picture.arrow((180, y + 27), (240, 146))
    for x, *lines in (
        (240, "Discovery", "entry points,", "providers checked"),
        (420, "Selection", "named, or highest", "priority that can"),
        (600, "Binding", "signatures checked,", "every call checked"),
    ):
        picture.box(x, 101, 150, 90, "core", *lines)
    picture.arrow((390, 146), (420, 146))
    picture.arrow((570, 146), (600, 146))
    picture.box(420, 20, 150, 44, "data", "Recipe", "names, needs")
    picture.arrow((495, 64), (495, 101))
    picture.text(495, 225, "what cannot be used is listed with its reason", "middle")
    return picture


def placement() -> Drawing:
    """Who uses which device."""
    picture = Drawing(760, 250, "Colocated and separate placement on four devices")
    picture.text(180, 22, 'placement = "colocated"', "middle", bold=True)
    picture.text(570, 22, 'placement = "separate"', "middle", bold=True)
    for number in range(4):
        x = 10 + 86 * number
        picture.box(x, 40, 78, 60, "train", "trainer", f"rank {number}")
        picture.box(x, 104, 78, 60, "generate", "generator")
        picture.text(x + 39, 186, f"GPU {number}", "middle")
        other = 400 + 86 * number
        if number < 2:
            picture.box(other, 40, 78, 124, "train", "trainer", f"rank {number}")
        else:
            picture.box(other, 40, 78, 124, "generate", "generator")
        picture.text(other + 39, 186, f"GPU {number}", "middle")
    picture.text(180, 215, "they take turns; a refit stays on the device", "middle")
    picture.text(570, 215, "they work at once; a refit travels by NCCL", "middle")
    return picture


def overlap() -> Drawing:
    """Generation ahead of training, in time."""
    picture = Drawing(760, 270, "Steps over time at a staleness of 0 and of 1")
    for top, heading, separate in ((10, "max_staleness = 0", False), (140, "max_staleness = 1", True)):
        picture.text(10, top + 14, heading, bold=True)
        picture.text(10, top + 48, "generator")
        picture.text(10, top + 92, "trainer")
        for number in range(3 if not separate else 5):
            start = 90 + (210 if not separate else 120) * number
            picture.box(start, top + 28, 112, 32, "generate", f"samples {number + 1}")
            shift = start + 112 if not separate else start + 120
            if shift + 84 <= 750:
                picture.box(shift, top + 72, 84, 32, "train", f"update {number + 1}")
    picture.text(750, 262, "time →", "end")
    return picture


PUBLIC_PATHS = {"attention", "buckets", "digest", "logprobs", "losses", "microbatch", "models", "trainer_hooks"}
"""Modules of torchkit by which plugins of others import from its rooms."""


@cache
def graph(package: str) -> grimp.ImportGraph:
    return grimp.build_graph(package, cache_dir=None)


def imports_between_rooms(package: str) -> dict[str, set[str]]:
    """Each room of a package, and the rooms that it imports."""
    found = graph(package.partition(".")[0])
    room = {child: room_of(child, package) for child in sorted(found.find_children(package))}
    arrows: dict[str, set[str]] = {name: set() for name in room.values()}
    for importer, imported in permutations(room, 2):
        if room[importer] != room[imported] and found.direct_import_exists(
            importer=importer, imported=imported, as_packages=True
        ):
            arrows[room[importer]].add(room[imported])
    return arrows


def room_of(module: str, package: str) -> str:
    """The room that a module or folder is drawn as: its own, or one with others of its kind."""
    name = module.removeprefix(f"{package}.")
    if package == "rlcore_torchkit" and name in PUBLIC_PATHS:
        return "public paths"
    if package != "rlcore" or graph(package).find_children(module):
        return name
    if name == "__main__":
        return "cli"
    # Modules beside the folders: those that import nothing of the core, those that read the interface alone, and those that
    # stand above folders, such as api.
    parts = {imported.split(".")[1] for imported in graph(package).find_modules_directly_imported_by(module) if "." in imported}
    folders = {part for part in parts if graph(package).find_children(f"rlcore.{part}")}
    if not parts:
        return "plain modules"
    return "other modules" if folders <= {"spi", "schema"} else name


def levels(arrows: Mapping[str, set[str]]) -> dict[str, int]:
    """The level of each room: 0 imports no room, and every other is one above the highest that it imports. ValueError for rooms
    that import each other in a circle."""
    found: dict[str, int] = {}
    while len(found) < len(arrows):
        ready = [room for room, imported in arrows.items() if room not in found and imported <= found.keys()]
        if not ready:
            raise ValueError(f"found a circle of imports among {', '.join(sorted(arrows.keys() - found.keys()))}")
        found |= {room: 1 + max((found[other] for other in arrows[room]), default=-1) for room in ready}
    return found


def shortest(arrows: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no longer way replaces."""
    reached: dict[str, set[str]] = {}
    for room in sorted(arrows, key=levels(arrows).__getitem__):
        reached[room] = arrows[room].union(*(reached[other] for other in arrows[room]))
    return [
        (room, other)
        for room in sorted(arrows)
        for other in sorted(arrows[room])
        if not any(other in reached[between] for between in arrows[room])
    ]


def rooms(package: str) -> Drawing:
    """The folders of a package in rows: each imports from rows below alone. An arrow that a longer way replaces is left out."""
    arrows = imports_between_rooms(package)
    level, wide, high, gap = levels(arrows), 150, 30, 40
    rows: dict[int, list[str]] = {}
    for room in sorted(arrows):
        rows.setdefault(level[room], []).append(room)
    width = 20 + max(len(row) for row in rows.values()) * (wide + 16)
    top = max(rows)
    picture = Drawing(width, 24 + (top + 1) * (high + gap), f"{package}: rooms, each importing those below it")
    place: dict[str, tuple[int, int]] = {}
    for number in range(top, -1, -1):
        above = [(room, other) for room, other in shortest(arrows) if level[room] > number]
        middles = {
            room: [place[importer][0] for importer, imported in above if imported == room] or [width // 2]
            for room in rows[number]
        }
        row = sorted(rows[number], key=lambda room: (sum(middles[room]) / len(middles[room]), room))
        for column, room in enumerate(row):
            place[room] = (width * (2 * column + 1) // (2 * len(row)), 12 + (top - number) * (high + gap))
    for room, other in shortest(arrows):
        picture.arrow((place[room][0], place[room][1] + high), (place[other][0], place[other][1]))
    for room, (x, y) in place.items():
        picture.box(
            x - wide // 2, y, wide, high, "core" if package.startswith("rlcore.") or package == "rlcore" else "plugin", room
        )
    return picture


PACKAGES = ("rlcore", "rlcore.run", "rlcore_torchkit", "rlcore_vllm", "rlcore_megatron")
DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "step": step,
    "plugins": plugins,
    "placement": placement,
    "overlap": overlap,
    **{f"rooms-{package}": partial(rooms, package) for package in PACKAGES},
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
