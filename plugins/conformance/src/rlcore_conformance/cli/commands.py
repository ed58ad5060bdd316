"""The commands of the distribution, described for its entry points."""

from rlcore.spi.command import CommandSpec
from rlcore.spi.version import SPI_VERSION

NEW_PLUGIN = CommandSpec(
    name="new-plugin",
    spi=SPI_VERSION,
    help="Write a package with a plugin that works: change it into your own.",
    command="rlcore_conformance.cli.new_plugin:new_plugin_command",
    priority=30,
)
VERIFY = CommandSpec(
    name="verify",
    spi=SPI_VERSION,
    help="Run the conformance kit on an installed plugin.",
    command="rlcore_conformance.cli.verify_command:verify_command",
    priority=25,
)
REFERENCE = CommandSpec(
    name="reference",
    spi=SPI_VERSION,
    help="Print every key of a recipe, as Markdown.",
    command="rlcore_conformance.cli.config_reference:reference_command",
    priority=15,
)
