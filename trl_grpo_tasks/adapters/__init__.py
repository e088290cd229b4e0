"""Tasks of other libraries: each module makes the tasks of one library a `Task`; see `registry.PREFIXES`."""

import zlib


def is_held_out(prompt: str, one_in: int) -> bool:
    """Whether this prompt belongs to the test split: one prompt in `one_in` does, whatever the seed of a data set."""
    return zlib.crc32(prompt.encode(errors="replace")) % one_in == 0
