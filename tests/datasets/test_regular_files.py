"""Folders of data sets: links that end, and nothing but files."""

import os
from pathlib import Path

import pytest

from rlcore_datasets.regular_files import require_tree


def test_folders_end(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "c").symlink_to("a/b")
    require_tree(tmp_path)
    require_tree(inner / "file")
    (inner / "up").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="in which it lies"):
        require_tree(tmp_path)
    (inner / "up").unlink()
    os.mkfifo(inner / "pipe")
    with pytest.raises(OSError, match="named pipe"):
        require_tree(tmp_path)
