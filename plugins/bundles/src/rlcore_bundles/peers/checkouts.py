"""Frameworks that are read from a checkout of their sources."""

import sys
from pathlib import Path

import torch

from rlcore_bundles.peers.contract import PeerError, Setup


def on_path(setup: Setup, *folders: str, file: str) -> None:
    """Put folders of the checkout first on the path of imports. PeerError where `file` is not in it. Without a checkout the
    framework is imported as it is installed."""
    if setup.checkout is None:
        return
    if not (setup.checkout / file).is_file():
        raise PeerError(f"--checkout: found no {file} in {setup.checkout}; expected the folder of the framework's sources")
    sys.path[:0] = [str(setup.checkout / folder) for folder in folders]


def version_of(name: str, setup: Setup) -> str:
    """The name with the commit of the checkout, where it has one."""
    head = None if setup.checkout is None else _commit(setup.checkout / ".git")
    return name if head is None else f"{name} {head[:9]}"


def padded_front(column: torch.Tensor) -> torch.Tensor:
    """[N, 1 + R]: a column behind one place more, that of the prompt."""
    return torch.cat([torch.zeros_like(column[:, :1]), column], 1)


def _commit(folder: Path) -> str | None:
    head = folder / "HEAD"
    if not head.is_file():
        return None
    text = head.read_text().strip()
    if not text.startswith("ref: "):
        return text
    file = folder / text.removeprefix("ref: ")
    return file.read_text().strip() if file.is_file() else None
