"""What the leaders of data-parallel ranks tell all ranks of their servers. Not here: servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerStatus:
    """A server as one leader sees it."""

    name: str
    state: str  # of Member
    tensor: int
    address: tuple[str, str | None, int]  # URL, key, and the sum of its members' lives
    sender: int | None  # the data-parallel rank that sends it the weights; None: another knows


def one_per_server(statuses: Sequence[ServerStatus]) -> list[ServerStatus]:
    """What the leaders that share a server say of it, as one status, in the order of the names.

    It lacks the weights if any of them says so. The sum of its lives changes whenever a leader has
    seen it fail.
    """
    by_name: dict[str, list[ServerStatus]] = {}
    for status in statuses:
        by_name.setdefault(status.name, []).append(status)
    return [_as_one(same) for same in by_name.values()]


def _as_one(same: Sequence[ServerStatus]) -> ServerStatus:
    states = [status.state for status in same]
    url, api_key, _ = same[0].address
    return ServerStatus(
        name=same[0].name,
        state="needs_weights" if "needs_weights" in states else states[0],
        tensor=same[0].tensor,
        address=(url, api_key, sum(status.address[2] for status in same)),
        sender=next((status.sender for status in same if status.sender is not None), None),
    )
