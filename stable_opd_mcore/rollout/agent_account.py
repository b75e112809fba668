"""What became of an agent's requests, and what its harness lost of the student's turns.

Not here: who counts it (histories.py, sessions.py).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.data.token_prefixes import in_token_order, num_common
from stable_opd_mcore.metrics import Mean

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
# Of tokens; metrics have their shares
TOKENS = (
    "sampled_tokens",
    "trained_tokens",  # sampled, but not behind a `stop`, nor in an attempt that failed
    "context_tokens",  # of all contexts that are trained, whoever wrote them
    "repeated_tokens",  # of these, in how many another context of the episode begins as well
)


def lost_share(counts: Mapping[str, int]) -> float:
    """The share of rewritten requests, of those that have turns of the student."""
    lost = counts.get("rewritten", 0)
    of = lost + counts.get("continued", 0) + counts.get("forked", 0)
    return lost / of if of else 0.0


def num_repeated(contexts: Sequence[NDArray[np.int32]]) -> int:
    """The tokens of an episode's contexts less the nodes of the tree that the contexts are."""
    return sum(num_common(a, b) for a, b in pairwise(sorted(contexts, key=in_token_order)))


def shares(counts: Mapping[str, int]) -> dict[str, Mean]:
    """The trained share of the sampled tokens, and the repeated share of the contexts' tokens."""
    sampled, trained, read, repeated = (counts.get(name, 0) for name in TOKENS)
    return {"trained_share": Mean(trained, sampled), "repeated_share": Mean(repeated, read)}


def account_text(counts: Mapping[str, int]) -> str:
    """What became of an agent's requests and of the student's tokens, as a line to read."""
    kinds = ", ".join(f"{counts.get(name, 0)} {name}" for name in KINDS)
    more = [f"{name} {counts[name]}" for name in COUNTS if name not in KINDS and counts.get(name)]
    others = f" ({', '.join(more)})" if more else ""
    sampled, trained, read, repeated = (counts.get(name, 0) for name in TOKENS)
    return (
        f"requests: {kinds}{others}; {trained} of {sampled} sampled tokens trained, "
        f"{repeated} of {read} context tokens repeated"
    )
