"""Files that somebody else names are regular ones of a size that can be read, wherever they are named."""

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from data_support import require_source

from rlcore.config.data import DatasetConfig
from rlcore.config.load import read_raw
from rlcore.config.model import ModelConfig
from rlcore.schema.file_limits import memory_bytes, read_file, require_file
from rlcore.spi import RlcoreError
from rlcore_model_files.directory import model_problems
from rlcore_text.chats.images import image_file
from rlcore_text.rows.datasets import load_rows
from rlcore_text.tokenizers.tokenizer import load_tokenizer


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def sparse(path: Path) -> None:
    """A file of four TiB without a block on the disk."""
    with path.open("wb") as file:
        file.truncate(2**42)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        made.bind(path.name)
        os.chdir(before)


KINDS = {
    pipe: "named pipe",
    device: "a device",
    listening: "a socket",
    circle: "ymbolic link",
    sparse: "more bytes than are read",
}


@pytest.mark.parametrize("make", KINDS)
def test_what_is_no_file_to_read_is_an_error_of_the_system(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "file")
    for read in (read_file, lambda path: require_file(path, 1000)):
        with pytest.raises(OSError, match=KINDS[make]) as caught:
            read(tmp_path / "file")
        assert caught.value.filename == str(tmp_path / "file")


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    assert read_file(file, 3) == b"abc"
    require_file(file)
    with pytest.raises(OSError, match="more bytes"):
        read_file(file, 2)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "other")
    with pytest.raises(OSError, match="more bytes"):
        read_file(Path("/proc/self/status"), 10)  # which says that it has none
    assert 2**20 < memory_bytes() < 2**50


def recipe(path: Path) -> None:
    read_raw(path, ())


def extended(path: Path) -> None:
    base = path.parent / "recipe.toml"
    base.write_text(f'extends = "{path.name}"\n')
    read_raw(base, ())


def rows(source: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        require_source(source)
        load_rows(DatasetConfig(source=source, path=str(path)), "train", None)

    read.__name__ = source
    return read


def parquet_in_folder(path: Path) -> None:
    rows("parquet")(path.parent)


def hub_folder(path: Path) -> None:
    rows("huggingface")(path.parent)


def of_model(name: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        folder = path.parent / "model"
        (folder / "additional_chat_templates").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / name).unlink(missing_ok=True)
        path.rename(folder / name)
        problems = model_problems(str(folder))
        assert any(problem.path.endswith(name) for problem in problems)
        if not name.endswith(".safetensors"):
            with pytest.raises(RlcoreError, match=re.escape(name)):
                load_tokenizer(ModelConfig(path=str(folder)))
        raise RlcoreError("\n".join(map(str, problems)))

    read.__name__ = name
    return read


def function(path: Path) -> None:
    functions = pytest.importorskip("rlcore_workers.functions")
    path.rename(path.parent / "reward.py")
    functions.load_function(f"{path.parent / 'reward.py'}:score", "environment.function.path")


def image(path: Path) -> None:
    image_file(str(path))


READERS = [
    recipe,
    extended,
    rows("jsonl"),
    rows("csv"),
    rows("parquet"),
    parquet_in_folder,
    hub_folder,
    *map(of_model, ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")),
    *map(of_model, ("tekken.json", "vocab.txt", "additional_chat_templates/tools.jinja", "model.safetensors.index.json")),
    of_model("model.safetensors"),
    function,
    image,
]
WHOLE = [reader for reader in READERS if "safetensors" not in reader.__name__ or "index" in reader.__name__]
"""Those that read all of a file."""


@pytest.mark.parametrize(
    ("reader", "make"),
    [
        pytest.param(reader, make, id=f"{reader.__name__}-{make.__name__}")
        for reader in READERS
        for make in KINDS
        if make is not sparse or (reader in WHOLE and reader.__name__ not in ("parquet", "parquet_in_folder", "hub_folder"))
    ],
)
def test_no_reader_waits_for_what_is_no_file(
    reader: Callable[[Path], None], make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "named"
    make(path)
    if make is circle:
        path.unlink()
        (tmp_path / "other").symlink_to("other")
        path.symlink_to(tmp_path / "other")
    with pytest.raises(RlcoreError) as caught:
        reader(path)
    said = str(caught.value)
    assert str(tmp_path) in said or path.name in said
    assert make is circle or KINDS[make] in said


def test_a_recipe_that_extends_more_files_than_there_can_be_is_refused(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.toml").write_text(f'extends = ["{number + 1}.toml", "{number + 1}.toml"]\n')
    (tmp_path / "40.toml").touch()
    with pytest.raises(RlcoreError, match="more than 200 files"):
        read_raw(tmp_path / "0.toml", ())


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="the kernel's messages are not readable here")
def test_a_regular_file_that_waits_for_its_content_is_refused() -> None:
    with pytest.raises(OSError, match="kmsg"):
        for _ in range(1000):  # until the kernel's last message is read
            read_file(Path("/proc/kmsg"))


def test_no_more_bytes_are_reserved_than_a_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("content")
    assert read_file(tmp_path / "file", 2**60) == b"content"
    monkeypatch.setattr("rlcore.schema.file_limits.MAX_BYTES", 5)
    assert read_file(tmp_path / "file", 2**60) == b"content"
    with pytest.raises(OSError, match="more bytes"):
        read_file(Path("/proc/self/status"), 2**60)
