"""docs/configuration.md equals the page generated from the settings."""

from pathlib import Path

from tools.settings_page import settings_page

ROOT = Path(__file__).parents[2]


def test_configuration_page_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == settings_page(), "run: python -m tools.settings_page > docs/configuration.md"
