"""The demo's ring as an agent, and the runs that compare it with the generator (../agents.md).

    python docs/evidence/programs/ring_agent.py DIRECTORY [ARM]

Trains the models of `stable-opd demo --agents`, then the same arm twice: its ring is played by the
generator of commands/demo/ring.py, and by `agent`, which sends the same texts to a URL. The
settings, seeds and rows are the same.
"""

import json
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

from stable_opd_mcore.commands.demo.ring import episode


def agent(row, seed, base_url):
    game, messages = episode(row, seed), []
    text = next(game) or row["messages"][0]["content"]
    while True:
        messages.append({"role": "user", "content": text})
        messages.append(say(base_url, messages))
        try:
            text = game.send(messages[-1]["content"])
        except StopIteration as end:
            return end.value


def say(base_url, messages):
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "student", "messages": messages}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def main(directory: Path, arm: str) -> None:
    from stable_opd_mcore.commands.demo.agents import agent_jobs, write_transcripts
    from stable_opd_mcore.commands.demo.runner import run_jobs

    jobs = [job for job in agent_jobs(directory) if job.arm in (None, arm)]
    write_transcripts(jobs)
    run_jobs(jobs)
    (played,) = (job for job in jobs if job.arm)
    config, home = json.loads(json.dumps(played.config)), played.directory.with_name(f"{arm}_agent")
    config["run"]["name"] = home.name
    environment = config["data"]["train"][1]["environment"]
    environment |= {"function": f"{Path(__file__).resolve()}:agent", "workers": 4}
    run_jobs([replace(played, name=home.name, directory=home, config=config, after=())])
    for name, run in (("generator", played.directory), ("agent", home)):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        print(name, *(f"{each['source/ring/accuracy']:.2f}" for each in rows[9::10]))


if __name__ == "__main__":
    began = time.monotonic()
    main(Path(sys.argv[1]).resolve(), *(sys.argv[2:] or ["opd_stop_class"]))
    print(f"{time.monotonic() - began:.0f} s")
