"""Numbers as people read them: counts, shares, sizes, durations; `–` where a value is unknown."""

GIB = 1 << 30


def as_count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def as_share(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}%}"


def as_figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def as_bytes(value: float) -> str:
    """A size in binary units: `512 bytes`, `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def as_duration(seconds: float | None) -> str:
    """`41.0 s`, `6 min 05 s` or `2 h 30 min`."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
