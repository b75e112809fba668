"""Rewards of the user's own."""


def quarter(row, response):
    return 0.25


def by_length(row, response):
    """Differs within groups, whatever the responses are worth."""
    return len(response) % 3 / 2
