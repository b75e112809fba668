"""The state of a server as the leaders of data-parallel ranks tell it to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerStatus:
    """A server, as one leader knows it or as all of them together."""

    name: str
    state: str  # of Member
    tensor: int
    address: tuple[str, str | None, int]  # URL, API key, and how often leaders saw it fail
    sender: int | None  # the data-parallel rank that sends it the weights; None: another knows


def one_per_server(statuses: Sequence[ServerStatus]) -> list[ServerStatus]:
    """One status per server, from those of all leaders that share it.

    A server needs weights if any leader says so. Failures are added up, so the address differs
    after each one that any leader has seen.
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
