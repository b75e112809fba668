"""What became of an agent's requests, and what its harness lost of the student's turns.

Not here: who counts it (histories.py, sessions.py).
"""

from collections.abc import Mapping

# What becomes of an agent's requests, each counted in one of these
KINDS = (
    "continued",  # of the end of a context
    "forked",  # of an earlier turn of a context: a new context with the same tokens up to there
    "begun",  # no turn of the student is in it: a first request, a sub-agent, a summary
    "rewritten",  # it has turns of the student in another form: the chat template writes all of it
)
# Why requests were rewritten, and what else a harness lost
LOSSES = (
    "rewritten_edited",  # no history equals theirs
    "rewritten_tools",  # the tools are others
    "rewritten_refused",  # the chat template cannot write the new messages after a turn
    "dropped_thoughts",  # continued without a turn's thought, which the student still reads
)
# Metrics environment/...
COUNTS = (
    *KINDS,
    *LOSSES,
    "retries",  # requests that got a turn which was sampled for an earlier one
    "refused_requests",
    "unparsed_calls",  # turns with a damaged tool call, which is part of their text
    "forced_calls",  # requests that demand a tool call; the student may answer otherwise
    "stop_cut_tokens",  # sampled after a text at which a request wanted the turn to stop
    "unread_turns",  # whose client had gone, and did not ask again
)


def lost_share(counts: Mapping[str, float]) -> float:
    """The share of rewritten requests, of those that have turns of the student."""
    lost = counts.get("rewritten", 0)
    of = lost + counts.get("continued", 0) + counts.get("forked", 0)
    return lost / of if of else 0.0


def account_text(counts: Mapping[str, float]) -> str:
    """What became of an agent's requests, for people."""
    kinds = ", ".join(f"{counts.get(name, 0):g} {name}" for name in KINDS)
    more = [f"{name} {counts[name]:g}" for name in COUNTS if name not in KINDS and counts.get(name)]
    return f"requests: {kinds}" + (f" ({', '.join(more)})" if more else "")
