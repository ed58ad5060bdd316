"""Format bytes as GiB or MiB."""

GIB = 2**30


def gib(num_bytes: float) -> str:
    """Return bytes in GiB, or in MiB below a tenth of one."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
