"""Bytes as people read them."""

GIB = 2**30


def gib(num_bytes: float) -> str:
    """Bytes as people read them."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
