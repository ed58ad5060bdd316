"""Uploads the exported model to a repository on the Hugging Face Hub."""

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from rlcore.registry.plugin_errors import first_line
from rlcore.run.observers import ObservedRun
from rlcore.run.protocols import LoopObserver
from rlcore.spi import StorageError
from rlcore_hub.check import KEY

MEANINGS = {
    401: "it does not know the token. Set HF_TOKEN to one that may write, or run: hf auth login",
    403: "the token may not write there. Take one that may, or another repository",
}


class HubUpload(LoopObserver):
    """Uploads what a complete run has exported."""

    def __init__(self, run: ObservedRun) -> None:
        self._run = run

    def on_complete(self, summary: Mapping[str, object]) -> None:
        """See LoopObserver."""
        repository = self._run.recipe.checkpoint.push_to_hub
        assert repository is not None, "only runs of recipes with the key have this observer"
        self._run.progress.note(f"uploaded to {upload(Path(str(summary['model'])), repository)}")


def upload(exported: Path, repository: str) -> str:
    """Upload a directory, to a private repository where there is none of that name, and return its address. StorageError says
    why it could not, and how to do it later."""
    endpoint = os.environ.get("HF_ENDPOINT") or None
    api = HfApi(endpoint=endpoint)
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=exported, commit_message="Upload what rlcore exported")
    except Exception as error:  # of the client, and of the library that it makes its requests with
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        reason = MEANINGS.get(status or 0, f"{type(error).__name__}: {first_line(error)}")
        refused = StorageError(f"{KEY}: {exported} could not be uploaded to {repository} at {api.endpoint}: {reason}")
        refused.add_note(f"The run is complete. This uploads it later: hf upload {repository} {exported}")
        raise refused from error
    return str(address)
