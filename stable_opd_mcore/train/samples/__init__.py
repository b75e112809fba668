"""The samples of a step: collected, shared out over ranks, and what is recorded of them."""
