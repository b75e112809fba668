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
    worth, theirs = ((each.reward or 0) for each in (rollout, others[0]))
    if worth > theirs:
        return None
    return f"{row.get('problem', '1')}={others[0].text[:3]}={int(theirs)}"
