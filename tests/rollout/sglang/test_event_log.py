"""Events of servers: a line in the file at once, a count for each kind since the last call."""

import json

from stable_opd_mcore.monitoring.names import require_known
from stable_opd_mcore.rollout.sglang.event_log import EventLog


def test_events_are_written_at_once_and_counted_since_the_last_call(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    log = EventLog(path)
    log.add("redrawn", "http://a", "time-out", count=3)
    log.add("redrawn", "http://b", "time-out", count=2)
    log.add("published", "http://a", "version 1")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["event"], row["server"], row["count"]) for row in rows] == [
        ("redrawn", "http://a", 3),
        ("redrawn", "http://b", 2),
        ("published", "http://a", 1),
    ]
    counts = log.take_metrics().values_by_key()
    require_known(counts)
    assert counts["engine/redrawn"] == 5
    assert counts["engine/failure"] == 0
    assert log.take_metrics().values_by_key()["engine/redrawn"] == 0
