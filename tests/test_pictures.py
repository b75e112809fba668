"""The pictures of the documents are those that tools/pictures.py writes."""

from pathlib import Path

from tools.pictures import PICTURES

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


def test_pictures_are_current():
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == PICTURES, (
        "run: python -m tools.pictures docs/pictures"
    )
