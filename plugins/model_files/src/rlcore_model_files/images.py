"""Decode the files of images, and load the image processor of a model.

Importing this file imports neither Pillow nor transformers.
"""

import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rlcore.schema.file_limits import expanded
from rlcore.spi.errors import DataError, ModelError, Problem
from rlcore.time_limit import loading

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Names of the files of a model that may describe its image processor."""
INSTALL = "Install what reads them: pip install 'rlcore[images]'"


def decode_image(file: bytes) -> Any:
    """The Pillow image in RGB. DataError where the file is none, is damaged, or unpacks to more pixels than Pillow trusts."""
    return _of_image(file, lambda image: image.convert("RGB"))


def image_size(file: bytes) -> tuple[int, int]:
    """Return an image's height and width in pixels, which its header holds. DataError as of `decode_image`."""
    width, height = _of_image(file, lambda image: image.size)
    return height, width


def _of_image(file: bytes, read: Callable[[Any], Any]) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"found images, and no usable Pillow ({error}). {INSTALL}") from error
    try:
        return read(Image.open(io.BytesIO(file)))
    except Image.DecompressionBombError as error:
        raise DataError(f"an image of {len(file):,} bytes is too large: {error}. Scale it down") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{len(file):,} bytes that begin {file[:8]!r} are no image that Pillow reads: {error}") from error


def load_image_processor(path: str, revision: str | None, *, trust_remote_code: bool) -> Any:
    """The image processor of transformers that belongs to a model. ModelError where there is none that says how many patches
    an image has."""
    from transformers import AutoImageProcessor

    found = ""
    try:
        with loading(f"the image processor of {path}") if expanded(path).is_dir() else nullcontext():
            processor = AutoImageProcessor.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        if hasattr(processor, "get_number_of_image_patches") and hasattr(processor, "merge_size"):
            return processor
        found = f"{type(processor).__name__}, which does not say how many patches an image has"
    except Exception as error:  # OSError, ValueError, ImportError, KeyError, by what is missing
        if not trust_remote_code and "trust_remote_code" in str(error):
            found, remedy = (
                "an image processor whose code comes with the model",
                "Read it, and then set model.trust_remote_code to true",
            )
            raise ModelError(
                [Problem(path=path, found=found, expected="code that the recipe trusts", remedy=remedy)]
            ) from error
        found = f"no image processor that loads ({str(error).strip().splitlines()[0]:.200})"
    expected = "preprocessor_config.json of a model such as Qwen2.5-VL, and Pillow"
    remedy = f"{INSTALL}; before 5.18 transformers needs torchvision too"
    raise ModelError([Problem(path=path, found=found, expected=expected, remedy=remedy)])
