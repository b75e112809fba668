"""docs/environments.md: every block is run, those of absent packages with stand-ins for them."""

import re
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from stable_opd_mcore.host.user_code import read_user_function
from stable_opd_mcore.rollout.environments import EnvironmentPool
from tests.config.cases import run_with

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
FILES = {
    found[1]: block for _, block in BLOCKS if (found := re.match(r"# envs/(\w+\.py)\n", block))
}
OTHERS = [(language, block) for language, block in BLOCKS if block not in FILES.values()]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The files of the page in the working directory."""
    (tmp_path / "envs").mkdir()
    for name, block in FILES.items():
        (tmp_path / "envs" / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def episode(name):
    return read_user_function(f"envs/{name}:episode", ("row", "seed")).load()


def played(episode, *turns):
    """All that an episode yields, and its reward."""
    yielded = [next(episode)]
    for said in turns[:-1]:
        yielded.append(episode.send(said))
    with pytest.raises(StopIteration) as end:
        episode.send(turns[-1])
    return yielded, end.value.value


def test_each_block_has_a_test():
    others = ["frozen_lake.py", "tools.py", "mcp_tools.py", "open_env.py"]
    assert list(FILES) == ["guess.py", "service.py", *others]
    assert [language for language, _ in OTHERS] == ["python", "yaml"]


def test_the_first_example_is_played_by_hand_and_in_a_pool(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "envs", raising=False)
    exec(OTHERS[0][1], {})
    assert capsys.readouterr().out.splitlines()[1] == "Higher."
    config = run_with(**yaml.safe_load(OTHERS[1][1]))
    assert (config.environment.max_turns, config.environment.max_new_tokens) == (5, 64)
    service = read_user_function("envs/service.py:episode", ("row", "seed"))
    pool = EnvironmentPool(service, workers=1)
    assert pool.open("a", {"answer": "5"}, 0).result(60).observed is None
    assert pool.say("a", "It is 5").result(60).reward == 1
    pool.shutdown()
    pool = EnvironmentPool(config.environment.read(), workers=1)
    try:
        assert pool.open("a", {"number": 7}, 0).result(60).observed
        assert "Lower" in str(pool.say("a", "8").result(60).observed)
        assert "Higher" in str(pool.say("a", "I do not know").result(60).observed)
        assert pool.say("a", "7").result(60).reward == 1
    finally:
        pool.shutdown()


class Lake:
    """A row of fields, in the interface and the colours of gymnasium's FrozenLake."""

    def reset(self, seed):
        self.place = 0

    def step(self, action):
        self.place += {0: -1, 2: 1}.get(action, 0)
        return self.place, float(self.place == 2), self.place == 2, False, {}

    def render(self):
        fields = list("SFG")
        fields[self.place] = f"\x1b[41m{fields[self.place]}\x1b[0m"
        return "".join(fields)

    def close(self):
        self.place = -1


def test_gymnasium(monkeypatch):
    lake, fake = Lake(), ModuleType("gymnasium")
    vars(fake)["make"] = lambda *_, **__: lake
    monkeypatch.setitem(sys.modules, "gymnasium", fake)
    yielded, reward = played(episode("frozen_lake.py")({}, 0), "Right", "", "I walk right")
    assert yielded[0].endswith("\n*FG")
    assert yielded[1:] == ["S*G", "Say one of left, down, right, up."]
    assert (reward, lake.place) == (1, -1)


TURNS = [
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
    '<tool_call>{"name": "absent", "arguments": {}}</tool_call><tool_call>?</tool_call>',
    "It is 5",
]


def test_tools():
    yielded, reward = played(episode("tools.py")({"answer": "5"}, 0), *TURNS)
    five, (absent, no_json) = yielded[1:]
    assert (yielded[0], five, reward) == (None, [{"role": "tool", "content": "5"}], 1)
    assert absent["content"] == "KeyError: 'absent'"
    assert no_json["content"].startswith("JSONDecodeError")


def test_tools_of_an_mcp_server(monkeypatch):
    pytest.importorskip("anyio")
    events = []

    class ClientSession:
        def __init__(self, read, write):
            assert (read, write) == ("read", "write")

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            events.append("left")

        async def initialize(self):
            events.append("initialised")

        async def call_tool(self, name, arguments):
            text = str(sum(arguments.values())) if name == "add" else f"Unknown tool: {name}"
            return SimpleNamespace(content=[SimpleNamespace(text=text), SimpleNamespace()])

    @asynccontextmanager
    async def stdio_client(server):
        assert server == {"command": "python", "args": ["envs/server.py"]}
        yield "read", "write"
        events.append("ended")

    package, client, stdio = (
        ModuleType(name) for name in ("mcp", "mcp.client", "mcp.client.stdio")
    )
    vars(package).update(ClientSession=ClientSession, StdioServerParameters=dict)
    vars(stdio)["stdio_client"] = stdio_client
    for module in (package, client, stdio):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    function = episode("mcp_tools.py")
    yielded, reward = played(function({"answer": "5"}, 0), *TURNS)
    five, (absent, no_json) = yielded[1:]
    assert (yielded[0], five, reward) == (None, [{"role": "tool", "content": "5"}], 1)
    assert absent["content"] == "Unknown tool: absent"
    assert no_json["content"].startswith("JSONDecodeError")
    assert events == ["initialised", "left", "ended"]
    unfinished = function({"answer": "5"}, 0)
    next(unfinished)
    unfinished.close()
    assert events[3:] == events[:3]


def test_an_openenv_client(monkeypatch):
    class EchoEnv:
        def __init__(self, base_url):
            self.said = ["ready"]

        def sync(self):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.said.clear()

        def reset(self):
            return self.found()

        def step(self, message):
            self.said.append(message)
            return self.found()

        def found(self):
            observation = SimpleNamespace(echoed_message=self.said[-1])
            done = len(self.said) == 3
            return SimpleNamespace(observation=observation, done=done, reward=3.5 if done else None)

    fake = ModuleType("echo_env")
    vars(fake).update(EchoEnv=EchoEnv, EchoAction=lambda message: message)
    monkeypatch.setitem(sys.modules, "echo_env", fake)
    assert played(episode("open_env.py")({}, 0), "a", "b") == (["ready", "a"], 3.5)
