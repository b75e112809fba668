"""The numbers of a release, such as 2.14.1+cu130."""

import re


def release_numbers(release: str, count: int = 3) -> tuple[int, ...]:
    """The first `count` numbers, or as many as there are; () without any."""
    return tuple(map(int, re.findall(r"\d+", release)[:count]))
