"""configs/recipes/alfworld.py with stand-ins for textworld and alfworld."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from stable_opd_mcore.host.user_code import read_user_function

ROOM = "-= Welcome =-\n\nYou see a desk 1.\n\nYour task is to: put a pen in the desk 1."


class Household:
    """The second action that is allowed wins."""

    def __init__(self):
        self.done, self.is_closed = [], False

    def state(self, text, won=False):
        commands = ["look", "go to desk 1", "help"]
        return SimpleNamespace(feedback=text, won=won, admissible_commands=commands)

    def reset(self):
        return self.state(ROOM)

    def step(self, action):
        self.done.append(action)
        return self.state(f"After {action}.\n", won=action == "go to desk 1"), 0, False

    def close(self):
        self.is_closed = True


@pytest.fixture
def household(monkeypatch):
    played = Household()
    textworld, alfworld = ModuleType("textworld"), ModuleType("alfred_tw_env")
    textworld.EnvInfos = lambda **wanted: wanted
    textworld.start = lambda game, request_infos, wrappers: played
    alfworld.AlfredDemangler = lambda shuffle: None
    packages = {"textworld": textworld}
    name = "alfworld.agents.environment.alfred_tw_env"
    packages |= {name.rsplit(".", n)[0]: ModuleType("package") for n in (1, 2, 3)}
    for key, module in {**packages, name: alfworld}.items():
        monkeypatch.setitem(sys.modules, key, module)
    return played


def test_each_step_is_a_new_context_with_the_last_two_steps(household):
    function = read_user_function("configs/recipes/alfworld.py:episode", ("row", "seed"))
    episode = function.load()({"game": "game.tw-pddl"}, 0)
    texts = [next(episode)["restart"]]
    for said in ("<action>Look </action>", "no action", "<think>x</think><action>look</action>"):
        texts.append(episode.send(said)["restart"])
    with pytest.raises(StopIteration) as end:
        episode.send("<action>go to desk 1</action>")
    assert end.value.value == 1
    assert household.done == ["look", "look", "look", "go to desk 1"]
    assert household.is_closed
    assert all("Your task is to: put a pen in the desk 1.\n" in text for text in texts)
    assert "- look\n- go to desk 1\n\nThink" in texts[0]
    assert "step 1 and see: -= Welcome" in texts[0]
    assert "In step 1 you saw: -= Welcome" in texts[2]
    assert texts[3].count("In step") == 2
    assert "In step 2 you saw: After look.\nYour action: look\n" in texts[3]
