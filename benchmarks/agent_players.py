"""Agents of benchmarks/agents.py: connections of one process, which imports nothing but asyncio.

python agent_players.py TURNS    # reads "NUMBER BASE_URL" lines, writes NUMBER at the end of each
"""

import asyncio
import json
import sys


async def ask(host: str, port: int, path: str, messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": "student", "messages": messages}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    _, _, content = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    start, end = content.index(b"{"), content.rindex(b"}") + 1  # it comes in one chunk
    return json.loads(content[start:end])["choices"][0]["message"]["content"]


async def agent(number: str, url: str, turns: int) -> None:
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Step {turn}: " + 200 * "text "})
        said = await ask(name, int(port), f"/{path}", messages)
        messages.append({"role": "assistant", "content": said})
    print(number, flush=True)


async def main() -> None:
    loop, tasks = asyncio.get_running_loop(), set()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        tasks.add(loop.create_task(agent(*line.split(), turns=int(sys.argv[1]))))


asyncio.run(main())
