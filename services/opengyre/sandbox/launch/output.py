"""Cutting a long output down to its head and its tail. Pure; standard library only."""


def split_sizes(total: int, limit: int) -> tuple[int, int]:
    """Bytes of head and tail to keep of ``total`` bytes so that both together are at most ``limit``."""
    if total <= limit:
        return total, 0
    tail = limit // 2
    return limit - tail, tail


def _trim_head(data: bytes) -> bytes:
    """Drop an incomplete code point at the end of a cut."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if needed > back else data
    return data


def _trim_tail(data: bytes) -> bytes:
    """Drop continuation bytes at the start of a cut."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]


def join_text(head: bytes, tail: bytes, total: int) -> str:
    """Text of a stream of ``total`` bytes; invalid UTF-8 is replaced, what is missing is said in between."""
    if len(head) + len(tail) >= total:
        return (head + tail).decode("utf-8", "replace")
    kept_head, kept_tail = _trim_head(head), _trim_tail(tail)
    missing = total - len(kept_head) - len(kept_tail)
    gap = f"\n[... {missing} bytes left out ...]\n"
    return kept_head.decode("utf-8", "replace") + gap + kept_tail.decode("utf-8", "replace")
