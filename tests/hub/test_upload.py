"""What is exported goes to a server that speaks the Hub's few requests, by the Hub's own client."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.spi import StorageError
from rlcore_hub.upload import upload

from .hub_server import Hub, serving_hub  # type: ignore[import-not-found]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub(monkeypatch) as served:
        yield served


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name in ("README.md", "model.safetensors"):
        (tmp_path / "model" / name).write_text(f"the {name}")
    return tmp_path / "model"


def test_a_directory_is_uploaded_to_a_private_repository(hub: Hub, exported: Path) -> None:
    assert upload(exported, "ann/sums") == f"{hub.address}/ann/sums"
    assert hub.files == {name: f"the {name}".encode() for name in ("README.md", "model.safetensors")}
    (created,) = hub.created
    assert (created["organization"], created["name"], created["visibility"]) == ("ann", "sums", "private")
    assert hub.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("state", "reason"), [(401, "does not know the token"), (403, "may not write there"), (418, "HfHubHTTPError")]
)
def test_a_refusal_says_why_and_how_to_upload_later(hub: Hub, exported: Path, state: int, reason: str) -> None:
    hub.refuses = state
    with pytest.raises(StorageError, match=reason) as raised:
        upload(exported, "ann/sums")
    assert "hf_secret" not in str(raised.value)
    (note,) = raised.value.__notes__
    assert note.endswith(f"hf upload ann/sums {exported}")


@pytest.mark.usefixtures("hub")
def test_a_server_that_is_not_there_is_named(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="127.0.0.1:9: ConnectError"):
        upload(exported, "ann/sums")
