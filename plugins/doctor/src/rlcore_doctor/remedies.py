"""The commands that install a package again, from where it came."""

import json
import re
import shlex
from contextlib import suppress
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_BUILD = re.compile(r"\+(cpu|xpu|cu\d+|rocm[\d.]+)(?![\w.])")


def index_of(text: str) -> str:
    """Return the option with PyTorch's index where a text names one of its builds, such as "+cpu"; "" where it names none."""
    match = _BUILD.search(text)
    return f" --index-url https://download.pytorch.org/whl/{match[1]}" if match else ""


def direct_url(distribution: Distribution) -> dict[str, Any]:
    """Return what an installer wrote of a source that is no registry; empty where it wrote nothing that can be read."""
    with suppress(Exception):  # a file of an installer's own, in any state
        return dict(json.loads(distribution.read_text("direct_url.json") or "{}"))
    return {}


def reinstall(name: str, version: str, distribution: Distribution) -> str:
    """Return the command that installs this version again; a sentence where no registry has it and its source is unknown."""
    source = direct_url(distribution)
    address = _without_login(str(source.get("url", "")))
    pip = "pip install --force-reinstall --no-deps"
    if "dir_info" in source:
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"{pip} {editable}{shlex.quote(unquote(urlsplit(address).path))}"
    if "vcs_info" in source:
        kind, commit = source["vcs_info"].get("vcs", "git"), source["vcs_info"].get("commit_id", "")
        return f"{pip} {shlex.quote(f'{name} @ {kind}+{address}@{commit}')}"
    if address:
        return f"{pip} {shlex.quote(f'{name} @ {address}')}"
    with suppress(OSError, UnicodeDecodeError):
        if (distribution.read_text("INSTALLER") or "").strip() == "conda":
            return f"conda install --force-reinstall {name}={version}"
    if "+" in version and not index_of(version):
        return f"Install {name} {version} again from its source: no registry has versions with +"
    return f"{pip} {name}=={version}{index_of(version)}"


def remove_and_reinstall(folders: list[Path], command: str) -> str:
    """Return the command that removes folders of metadata, which pip cannot read, before another command."""
    removal = f"rm -r {' '.join(shlex.quote(str(folder)) for folder in folders)}"
    return f"{removal} && {command}" if command.startswith(("pip ", "conda ")) else ". ".join(filter(None, (removal, command)))


def without(names: str, torch: str) -> str:
    """Return the remedy for packages of images and sound, `names`, that this torch does not load."""
    return f"pip uninstall {names}, which text models do not need; or install the release for {torch}"


def _without_login(address: str) -> str:
    parts = urlsplit(address)
    login, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"git@{host}" if login == "git" else host).geturl()
