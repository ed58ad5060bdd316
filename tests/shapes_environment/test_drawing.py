"""Drawings follow from their numbers."""

import numpy as np

from rlcore_model_files.images import decode_image
from rlcore_shapes.config import ShapesConfig
from rlcore_shapes.drawing import KINDS, draw


def test_a_drawing_is_the_same_whenever_it_is_drawn():
    config = ShapesConfig(grid=3, cell_pixels=10)
    first, again, other = draw(config, 0, 5), draw(config, 0, 5), draw(config, 1, 5)
    assert first == again
    assert first.png != other.png
    assert decode_image(first.png).size == (30, 30)


def test_every_drawing_has_a_shape_brighter_than_its_background():
    drawings = [draw(ShapesConfig(), 0, number) for number in range(40)]
    for drawing in drawings:
        pixels = np.asarray(decode_image(drawing.png))
        assert pixels[0, 0].max() < 64
        assert pixels.max() >= 128
    assert {drawing.kind for drawing in drawings} == set(KINDS)
    assert {0, 1, 2} <= {drawing.count for drawing in drawings}
