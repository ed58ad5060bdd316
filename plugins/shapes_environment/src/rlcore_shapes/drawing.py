"""Drawings of circles and squares, each determined by its number."""

import io

import numpy as np
from attrs import frozen
from PIL import Image, ImageDraw

from rlcore_shapes.config import ShapesConfig

KINDS = ("circle", "square")
EMPTY_SHARE = 0.3
"""Cells without a shape, of all but the first, which has one always: each drawing differs from the others by its colours."""


@frozen(kw_only=True)
class Drawing:
    """An image, and what is asked about it."""

    png: bytes
    kind: str
    """The kind of shape to count."""
    count: int
    """How many there are."""


def draw(config: ShapesConfig, stream: int, number: int) -> Drawing:
    """Drawing `number` of a stream, such as that of the held-out ones; the same whenever it is drawn."""
    rng = np.random.default_rng((config.drawing_seed, stream, number))
    side, cells = config.cell_pixels, config.grid**2
    image = Image.new("RGB", (config.grid * side,) * 2, _color(rng, 0, 64))
    pen = ImageDraw.Draw(image)
    filled = rng.random(cells) >= EMPTY_SHARE
    filled[rng.integers(cells)] = True
    kinds = np.where(filled, rng.integers(len(KINDS), size=cells), -1)
    for cell in np.flatnonzero(filled).tolist():
        left, top = cell % config.grid * side, cell // config.grid * side
        box = (left + 1, top + 1, left + side - 2, top + side - 2)
        shape = pen.ellipse if KINDS[kinds[cell]] == "circle" else pen.rectangle
        shape(box, fill=_color(rng, 128, 256))
    asked = int(rng.integers(len(KINDS)))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return Drawing(png=buffer.getvalue(), kind=KINDS[asked], count=int((kinds == asked).sum()))


def _color(rng: np.random.Generator, low: int, high: int) -> tuple[int, int, int]:
    red, green, blue = rng.integers(low, high, 3).tolist()
    return red, green, blue
