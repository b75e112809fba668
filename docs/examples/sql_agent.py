"""An agent on mini-swe-agent, whose student answers questions with SQL instead of shell commands.

    environment: {function: "docs/examples/sql_agent.py:episode", max_turns: 5}

A row has a question, `problem`, and the right query, `query`. The student sees what its queries
return from one database of things, until it says `submit`; the reward is 1 if its last query
returns what the right one does from four other databases. docs/evidence/agents.md has a curve.
"""

import os
import random
import sqlite3
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else LiteLLM asks the network for prices
os.environ["MSWEA_SILENT_STARTUP"] = "1"

import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import Submitted
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

COLOURS, SIZES = ("red", "green", "blue", "black"), ("small", "large", "huge")
NUMBERS = ("price", "weight", "age")
SYSTEM = "Answer with one SQL query about things. Submit when it is right."
# LiteLLM imports a hundred modules at its first call: once here, not in each episode.
litellm.completion("openai/student", [{"role": "user", "content": ""}], mock_response="")
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


def database(seed: int) -> sqlite3.Connection:
    """Twelve things at random; only reading is allowed."""
    rng, found = random.Random(seed), sqlite3.connect(":memory:")
    found.execute("CREATE TABLE things (colour, size, price, weight, age)")
    for _ in range(12):
        row = rng.choice(COLOURS), rng.choice(SIZES), *(rng.randrange(9) for _ in NUMBERS)
        found.execute("INSERT INTO things VALUES (?, ?, ?, ?, ?)", row)
    found.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else 1)
    return found


def ask(query: str, seed: int) -> tuple[int, str]:
    """0 and the first value that the query returns, or 1 and the error."""
    try:
        return 0, str((database(seed).execute(query).fetchone() or [None])[0])
    except (sqlite3.Error, sqlite3.Warning) as error:
        return 1, str(error)


class Database:
    """What mini-swe-agent calls an environment: it executes the student's commands."""

    query = ""

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        if action["command"] == "submit":
            raise Submitted({"role": "exit", "content": self.query, "extra": {}})
        self.query = action["command"]
        code, output = ask(self.query, seed=0)
        return {"output": f"{output}\n", "returncode": code, "exception_info": ""}

    def get_template_vars(self) -> dict[str, Any]:
        return {}

    def serialize(self) -> dict[str, Any]:
        return {}


def episode(row: dict[str, Any], seed: int, base_url: str) -> float:
    student = LitellmTextbasedModel(
        model_name="openai/student",
        model_kwargs={"api_base": base_url, "api_key": "-"},
        cost_tracking="ignore_errors",
    )
    shell, texts = Database(), {"system_template": SYSTEM, "instance_template": "{{task}}"}
    DefaultAgent(student, shell, step_limit=4, **texts).run(row["problem"])
    return float(all(ask(shell.query, n) == ask(row["query"], n) for n in range(1, 5)))
