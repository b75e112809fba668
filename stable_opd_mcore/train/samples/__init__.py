"""The samples of a step: drawn, shared out over ranks, and what is recorded of them."""
