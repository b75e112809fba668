"""The order of the tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of slow tests come first: at the end one worker would wait for the other."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
