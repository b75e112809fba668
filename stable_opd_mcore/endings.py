"""Why turns and episodes end. Loads without torch."""

from enum import StrEnum


class Ending(StrEnum):
    """Why a turn or an episode ended. A turn has one of the first three."""

    OPEN = "open"  # it has not: the turn may get more tokens, the episode another turn
    STOP = "stop"  # with a stop token; an episode: its environment returned the reward
    LENGTH = "length"  # cut at its most tokens, or by the window; without an environment also
    TURNS = "turns"  # the episode had as many turns as it may have
    WINDOW = "window"  # what the student would read next has no room in the window
    REFUSED = "refused"  # the chat template cannot write what the environment yielded
    FAILED = "failed"  # the environment failed: `Rollout.grading_failure` says how
    ABORTED = "abort"  # only in files of other programs: something interrupted the response


ENDED = {  # for people
    Ending.OPEN: "not finished",
    Ending.STOP: "stopped",
    Ending.LENGTH: "truncated",
    Ending.TURNS: "out of turns",
    Ending.WINDOW: "window full",
    Ending.REFUSED: "refused",
    Ending.FAILED: "failed",
    Ending.ABORTED: "aborted",
}
CUT = frozenset((Ending.LENGTH, Ending.TURNS, Ending.WINDOW))  # by a limit of the settings
