"""Seeds derived from keys."""

import hashlib


def derive_seed(*key: int | str) -> int:
    """A seed in [0, 2**31) from any key: equal keys give equal seeds on every machine, different ones are unrelated."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
