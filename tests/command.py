"""`stable-opd` in this process."""

import pytest

from stable_opd_mcore.cli import main


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `stable-opd ARGUMENTS`."""
    monkeypatch.setattr("sys.argv", ["stable-opd", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
