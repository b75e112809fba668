"""Rewards of the user's own, and a teacher's prompt."""


def quarter(row, response):
    return 0.25


def by_length(row, response):
    """Differs within groups, whatever the responses are worth."""
    return len(response) % 3 / 2


def parity(row, response):
    return len(response) % 2


def told(row, rollout, others):
    """What the first of the others said, unless this one is better."""
    if rollout.reward > others[0].reward:
        return None
    return f"{row['problem']}={others[0].text[:3]}={int(others[0].reward)}"
