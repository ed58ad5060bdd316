"""What the entry points name: descriptions, without heavy imports."""

from rlcore.spi import ChannelProvider, ClusterConfig, CommandSpec, DataSourceProvider, Provider

THREAD = Provider(name="thread", spi=(2, 0), config=ClusterConfig, backend="four_parts.thread:in_thread", priority=5)
SPOOL = ChannelProvider(
    name="spool",
    spi=(2, 0),
    cost=70,
    devices={"cpu", "cuda"},
    reach="anywhere",
    sender="four_parts.spool:Sender",
    receiver="four_parts.spool:Receiver",
)
INI = DataSourceProvider(name="ini", spi=(2, 0), read="four_parts.ini:read", suffixes={".ini"})
ROWS = CommandSpec(name="rows", spi=(2, 0), help="Print the rows of an INI file.", command="four_parts.rows:rows_command")
