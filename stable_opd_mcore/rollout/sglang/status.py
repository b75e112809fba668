"""The state of a server as the leaders of data-parallel ranks tell it to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ServerStatus:
    """A server, as one leader knows it or as all of them together."""

    name: str
    url: str
    api_key: str | None
    state: str  # of Member
    tensor: int
    life: int  # how often leaders saw it fail
    sender: int | None  # the data-parallel rank that sends it the weights; None: another knows


def one_per_server(statuses: Sequence[ServerStatus]) -> list[ServerStatus]:
    """One status per server, from those of all leaders that share it.

    A server needs weights if any leader says so. Its lives are added up, so they differ after each
    failure that any leader has seen.
    """
    by_name: dict[str, ServerStatus] = {}
    for other in statuses:
        status = by_name.setdefault(other.name, other)
        if status is not other:
            by_name[other.name] = replace(
                status,
                state=other.state if other.state == "needs_weights" else status.state,
                life=status.life + other.life,
                sender=other.sender if status.sender is None else status.sender,
            )
    return list(by_name.values())
