"""The version of the service-provider interface, which every plugin names."""

SPI_VERSION: tuple[int, int] = (2, 0)
"""(major, minor). A provider is usable when its major equals this one and its minor is not newer."""
