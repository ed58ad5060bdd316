"""Images that sequences read: encoded files, such as PNG, as they came with the data.

A file is a hundredth of the numbers that a model makes of it, and exact: whoever decodes it gets the same pixels. The samples
of a prompt hold one object, which pickle writes once.
"""

from typing import TypeAlias

from rlcore.spi.errors import ContractError

Images: TypeAlias = tuple[tuple[bytes, ...], ...]
"""For each sequence its images in order, each an encoded file. Its tokens hold as many placeholders for each as the model's
image processor says, in the same order. Placeholders behind these, which a policy may say, stand for none."""


def check_images(images: object, num_sequences: int) -> None:
    """ContractError unless there is a tuple of encoded files for each sequence."""
    if not isinstance(images, tuple) or len(images) != num_sequences:
        found = f"{len(images)} entries" if isinstance(images, tuple) else type(images).__name__
        raise ContractError(f"images: found {found}; expected a tuple of {num_sequences}, one of each sequence")
    for number, files in enumerate(images):
        if not isinstance(files, tuple) or not all(isinstance(file, bytes) for file in files):
            raise ContractError(f"images: found {type(files).__name__} for sequence {number}; expected a tuple of bytes")
