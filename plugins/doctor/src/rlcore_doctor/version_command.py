"""`rlcore version`."""

import json
import platform
from importlib import metadata

import click

from rlcore import __version__
from rlcore.installed import distribution_of, installed_entry_points
from rlcore.spi.provider import GROUPS
from rlcore.spi.version import SPI_VERSION

LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "pyarrow", "pluggy", "attrs", "cattrs")


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print the versions as JSON.")
def version_command(as_json: bool) -> None:
    """Print the versions in use.

    Of rlcore, its plugins, Python and the libraries that matter; none of them is imported.
    """
    found = versions()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, version in found.items():
        click.echo(f"{name:<{width}}  {version}")


def versions() -> dict[str, str]:
    """Versions by distribution: rlcore, its SPI, every distribution with a plugin, Python, then libraries."""
    found = {"rlcore": __version__, "SPI": ".".join(map(str, SPI_VERSION))}
    installed = installed_entry_points().entry_points
    for group in GROUPS:
        found.update(distribution_of(entry_point) for entry_point in installed.select(group=group))
    found["Python"] = platform.python_version()
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except (metadata.PackageNotFoundError, ValueError):
            continue
    return found
