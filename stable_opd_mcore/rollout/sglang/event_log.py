"""What happened to the servers: a line per event in a file, a count per kind in the metrics."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Literal

from stable_opd_mcore.metrics import Metrics, Sum

Event = Literal[
    "failure",  # a server failed
    "restart",  # a server of this run was ended and started again
    "retried",  # requests repeated to the same server after a transient failure
    "redrawn",  # responses sampled again after a failure
    "stale",  # responses from too old weights, dropped and sampled again
    "resent",  # weights sent again outside the usual publish
    "published",  # weights sent and verified
    "unverified",  # weights taken although something differs, by rollout.sglang.verify=warn
    "lost",  # the fleet cannot continue
]
_COUNTED: tuple[Event, ...] = (
    *("failure", "restart", "retried", "redrawn", "stale", "resent", "unverified"),
)
_log = logging.getLogger("stable_opd_mcore.rollout.sglang")


class EventLog:
    """Appends to `path`; safe to use from many threads. A line that cannot be written is only an
    error in the log: servers are restarted all the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, event: Event, server: str, detail: str, count: int = 1) -> None:
        row = {"time": time.time(), "event": event, "server": server, "detail": detail}
        row["count"] = count
        with self._lock:
            self._counts[event] += count
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:  # a full disk, or too many open files
                _log.error("%s: %s; an event is not written", self._path, error.strerror)
        if event != "published":
            _log.warning("%s %s: %s", server, event, detail)

    def take_metrics(self) -> Metrics:
        """Counts since the last call, 0 for kinds that did not happen."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return Metrics({f"engine/{event}": Sum(float(counts[event])) for event in _COUNTED})
