"""Tasks of other libraries: each module makes the tasks of one library a `Task`; see `registry.PREFIXES`."""

import zlib


def is_held_out(prompt: str, one_in: int) -> bool:
    """Whether this prompt belongs to the test split: one prompt in `one_in` does, whatever the seed of a data set."""
    return zlib.crc32(prompt.encode(errors="replace")) % one_in == 0


def verdict(reward: float, least: float) -> tuple[bool, str]:
    """Whether a reward is a success, and the reason if it is not."""
    success = reward >= least
    return success, "" if success else f"the reward is {reward:.3g}, less than {least:g}"
