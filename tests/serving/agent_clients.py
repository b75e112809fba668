"""What clients make of the replies of an agent's URL; run by the Python of `.venv-agents`.

python agent_clients.py BASE_URL    # prints one JSON object
"""

import asyncio
import json
import sys

import anthropic
import litellm
import openai

BASE_URL = sys.argv[1]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]
student = openai.OpenAI(base_url=BASE_URL, api_key="-", timeout=1.0, max_retries=2)
claude = anthropic.Anthropic(base_url=BASE_URL, api_key="-", timeout=1.0, max_retries=2)


def ask(text, client=student, **more):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="student", messages=messages, **more)


def streamed(text):
    options = {"include_usage": True}
    *parts, last = ask(text, stream=True, stream_options=options, tools=TOOLS)
    content = "".join(part.choices[0].delta.content or "" for part in parts)
    calls = [call for part in parts for call in part.choices[0].delta.tool_calls or []]
    return [content, [call.function.arguments for call in calls], last.usage.total_tokens]


async def asynchronous(text):
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="-", timeout=1.0) as client:
        replies = await asyncio.gather(*(ask(text, client) for _ in range(3)))
    return [reply.choices[0].message.content for reply in replies]


def error_of(ask_it):
    try:
        ask_it()
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return [type(error).__name__, error.status_code, getattr(error, "code", None)]
    return None


def lite(text, **more):
    messages = [{"role": "user", "content": text}]
    return litellm.completion("openai/student", messages, api_base=BASE_URL, api_key="-", **more)


def asked(text, **more):
    messages = [{"role": "user", "content": text}]
    return claude.messages.create(model="m", max_tokens=9, messages=messages, **more)


def asked_as_stream(text):
    messages = [{"role": "user", "content": text}]
    tools = [{"name": "add", "input_schema": ADD["parameters"]}]
    with claude.messages.stream(model="m", max_tokens=9, messages=messages, tools=tools) as stream:
        final = stream.get_final_message()
    return [block.model_dump(exclude_none=True) for block in final.content]


with_tool = ask("call", tools=TOOLS).choices[0]
found = {
    "plain": ask("hi").choices[0].message.content,
    "thought": ask("hi").choices[0].message.reasoning_content,
    "call": [with_tool.finish_reason, with_tool.message.tool_calls[0].function.arguments],
    "stream": streamed("hi"),
    "stream_call": streamed("call"),
    "asynchronous": asyncio.run(asynchronous("hi")),
    "slow": ask("wait").choices[0].message.content,
    "slow_stream": streamed("wait")[0],
    "slow_asynchronous": asyncio.run(asynchronous("wait")),
    "lost": ask("lost").choices[0].message.content,
    "full": error_of(lambda: ask("full")),
    "over": error_of(lambda: ask("over")),
    "image": error_of(lambda: ask([{"type": "image_url", "image_url": {"url": "data:x"}}])),
    "responses": error_of(lambda: student.responses.create(model="student", input="hi")),
    "models": [model.id for model in student.models.list()],
    "lite": lite("hi").choices[0].message.content,
    "lite_slow": lite("wait", timeout=1.0).choices[0].message.content,
    "claude": asked("hi").content[-1].text,
    "claude_slow": asked("wait").content[-1].text,
    "claude_stream": asked_as_stream("call"),
    "claude_over": error_of(lambda: asked("over")),
}
try:
    lite("full")
except litellm.ContextWindowExceededError:
    found["lite_full"] = "ContextWindowExceededError"
print(json.dumps(found))
