"""The command: what it prints and how it exits."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from stable_opd_mcore.cli import main
from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.errors import ConfigError
from tests.command import exit_code
from tests.train.runs import tiny_config

WRONG_PATHS = {
    "evaluate . nosuch": "nosuch: no such file or directory; give a config, a run",
    "evaluate . --config nosuch": "nosuch: no such file or directory; give a config",
    "convert nosuch new": "nosuch: no such file or directory; give a model's",
    "convert ./nosuch/model new": "nosuch/model: no such file or directory; give a model's",
    "convert . /proc/new": "/proc/new: cannot be created: No such file or directory; give a",
    "rehearse nosuch.yaml": "nosuch.yaml: no such config file",
}


def test_a_wrong_path_is_named_before_anything_heavy_is_imported():
    script = (
        "import sys\nfrom stable_opd_mcore.cli import main\n"
        f"for command in {list(WRONG_PATHS)}:\n"
        "    sys.argv = ['stable-opd', *command.split()]\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert ended.code == 2\n"
        "assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    messages = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    for line, message in zip(messages, WRONG_PATHS.values(), strict=True):
        assert line.startswith(f"error: {message}")
    assert ended.returncode == 0, ended.stderr


def test_a_reader_that_ends_ends_the_command_without_a_traceback():
    """`stable-opd --help | head -0`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stable_opd_mcore", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert (process.communicate()[1], process.returncode) == (b"", 1)


def raising(error):
    def train(*_args, **_settings):
        raise error

    return train


@pytest.fixture
def command(tmp_path):
    save_config(tiny_config(tmp_path, "run"), tmp_path / "run.yaml")
    return "train", tmp_path / "run.yaml"


def test_a_user_error_is_one_message_and_exit_code_2(command, monkeypatch, capsys):
    monkeypatch.setattr(
        "stable_opd_mcore.commands.train.train.train", raising(ConfigError("fix a=1"))
    )
    assert exit_code(monkeypatch, *command) == 2
    assert capsys.readouterr() == ("", "error: fix a=1\n")


@pytest.mark.parametrize("error", [ValueError("of torch"), OSError("of a socket")])
def test_any_other_error_keeps_its_traceback(command, monkeypatch, error):
    monkeypatch.setattr("stable_opd_mcore.commands.train.train.train", raising(error))
    monkeypatch.setattr("sys.argv", ["stable-opd", *map(str, command)])
    with pytest.raises(type(error), match=str(error)):
        main()


def test_a_second_ctrl_c_exits_with_130(command, monkeypatch, capsys):
    monkeypatch.setattr("stable_opd_mcore.commands.train.train.train", raising(KeyboardInterrupt()))
    assert exit_code(monkeypatch, *command) == 130
    assert "nothing was saved since the newest checkpoint" in capsys.readouterr().err


def test_quiet_and_version(command, monkeypatch, capsys):
    given = {}
    monkeypatch.setattr(
        "stable_opd_mcore.commands.train.train.train", lambda _, **kw: given.update(kw)
    )
    for arguments in ([*command, "--quiet"], ["--version"]):
        assert exit_code(monkeypatch, *arguments) == 0
    assert given["show_progress"] is False
    assert capsys.readouterr().out == f"stable-opd {version('stable-opd-mcore')}\n"


def test_evaluate_takes_an_existing_path_with_an_equals_sign_as_a_target(tmp_path, monkeypatch):
    runs, calls = [tmp_path / "a", tmp_path / "lr=1e-6" / "b"], []

    def evaluate(config, _say, *, others, **_options):
        calls.append((config.run.path, config.evaluation.temperature, list(others)))
        return config.evaluation_path / "model"

    monkeypatch.setattr("stable_opd_mcore.commands.evaluate.evaluate.evaluate_config", evaluate)
    for run in runs:
        run.mkdir(parents=True)
        save_config(tiny_config(run.parent, run.name), run / "config.resolved.yaml")
    settings = ("evaluation.temperature=0.5", f"data.system_prompt={'long ' * 60}")
    assert exit_code(monkeypatch, "evaluate", *runs, *settings) == 0
    assert calls == [(runs[0], 0.5, []), (runs[1], 0.5, [runs[0] / "evaluation" / "model"])]


def checked(monkeypatch, capsys, *arguments):
    """The exit code of `stable-opd check` and what it printed."""
    return exit_code(monkeypatch, "check", *arguments), capsys.readouterr()


def test_check_exits_with_1_where_there_are_errors(tmp_path, monkeypatch, capsys):
    place = ("configs/smoke_cpu.yaml", f"run.directory={tmp_path}", "--gpu", "cpu")
    code, printed = checked(monkeypatch, capsys, *place)
    assert (code, printed.out.splitlines()[-1]) == (0, "no finding")
    code, printed = checked(monkeypatch, capsys, *place, "data.train.path=/none.jsonl", "--json")
    (finding,) = json.loads(printed.out)["findings"]
    assert code == 1
    assert (finding["severity"], finding["subject"]) == ("error", "data")
    assert finding["title"].startswith("/none.jsonl: ")
    code, printed = checked(monkeypatch, capsys, "--student", tmp_path, "--teacher", "/none")
    assert code == 1
    assert printed.out.endswith("2 errors\n")
    code, printed = checked(monkeypatch, capsys, "--student", tmp_path)
    assert code == 2
    assert "--student DIR and --teacher DIR" in printed.err
