"""The description of `rlcore plan`."""

from rlcore.spi import SPI_VERSION, CommandSpec

PLAN = CommandSpec(
    name="plan",
    spi=SPI_VERSION,
    help="Predict memory and step time of a recipe on GPUs that need not be here.",
    command="rlcore_plan.command:plan_command",
    priority=50,
)
