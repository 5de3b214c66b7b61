"""A number of bytes -> a short text in the unit that reads best."""

_UNITS = (("TB", 1e12, 1e12), ("GB", 1e9, 1e8), ("MB", 1e6, 1e6), ("kB", 1e3, 1e3))  # (name, bytes of one, the least that is told in it)


def bytes_words(num_bytes: float) -> str:
    """`3.1 GB`, `12.4 MB`, `5.12 kB`, `17 bytes`."""
    for name, size, least in _UNITS:
        if abs(num_bytes) >= least:
            return f"{num_bytes / size:.3g} {name}"
    return f"{num_bytes:.0f} bytes"
