"""Five published chat templates with a tokenizer each, and five of which the texts are public.

Qwen2.5-Instruct and Qwen3 have the ids of Qwen2.5-Math's tokenizer, so it is read for them, too;
tokens of Qwen3 that it lacks are added. So it is for the five in SHORT, whose templates are written
here in a shorter form: with the same texts, but without tools' schemas, images, default system
messages and a token at the beginning.
"""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from stable_opd_mcore.data.chat import Tokenizer
from tests.real_data import real_data

MATH, QWEN25, QWEN3 = "Qwen2.5-Math-1.5B", "Qwen2.5-Instruct", "Qwen3"
THINKING, R1 = "Qwen3-Thinking-2507", "DeepSeek-R1-Distill-Qwen"

GLM45, GLM47, MOONLIGHT = "GLM-4.5-Air", "GLM-4.7-Flash", "Moonlight"
GEMMA, V2_LITE = "Gemma-3", "DeepSeek-V2-Lite"
_LAST_USER = (  # thoughts before the last user's message are left out
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_GLM_PARTS = (
    "{% set text = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1] %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{% set thought = thought|trim if loop.index0 > ns.last else '' %}"
)
_GLM_TOOL = "{{ '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}"
GLM45_TEMPLATE = (
    "[gMASK]<sop>" + _LAST_USER + "{% for m in messages %}{% if m.role == 'assistant' %}"
    f"{_GLM_PARTS}<|assistant|>\n<think>{{{{ thought }}}}</think>"
    "{{ '\n' + text|trim if text|trim }}{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>' + c.function.name }}\n"
    "{% for k, v in c.function.arguments|items %}<arg_key>{{ k }}</arg_key>"
    "\n<arg_value>{{ v if v is string else v|tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}{% elif m.role == 'tool' %}" + _GLM_TOOL + "\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{{ '/nothink' if m.role == 'user' and enable_thinking is false }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{{ '\n<think></think>' if enable_thinking is false }}{% endif %}"
)
GLM47_TEMPLATE = (
    "[gMASK]<sop>" + _LAST_USER + "{% for m in messages %}{% if m.role == 'assistant' %}"
    f"{_GLM_PARTS}<|assistant|>{{{{ '<think>' + thought if thought }}}}</think>{{{{ text|trim }}}}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments|items %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v if v is string else v|tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}" + _GLM_TOOL + "<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|assistant|>{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}"
)
GLM_MARKS = tuple(f"<|{role}|>" for role in ("system", "user", "assistant", "observation"))
GEMMA_TEMPLATE = (
    "{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if first else messages %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first }}"
    "{{ m.content|trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA_MARKS = ("<start_of_turn>", "<end_of_turn>")
SHORT = {  # template, control tokens
    GLM45: (GLM45_TEMPLATE, GLM_MARKS),
    GLM47: (GLM47_TEMPLATE, GLM_MARKS),
    GEMMA: (GEMMA_TEMPLATE, GEMMA_MARKS),
    V2_LITE: (
        "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content + '\n\n' }}"
        "{% elif m.role == 'assistant' %}Assistant: {{ m.content + eos_token }}"
        "{% elif m.role == 'system' %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}",
        (),
    ),
    MOONLIGHT: (  # the token before a role is that of a system, user or assistant message only
        "{% for m in messages %}{{ '<|im_' + m.role + '|>' if m.role != 'tool' }}{{ m.role }}"
        "<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    ),
}


@cache
def real_tokenizer(name: str, **template_kwargs: Any) -> Tokenizer:
    if name in (MATH, R1):
        return Tokenizer.load(str(real_data(f"tokenizers/{name}")))
    return Tokenizer(_backend(name), name, template_kwargs=template_kwargs)


@cache
def _backend(name: str) -> PreTrainedTokenizerFast:
    backend = PreTrainedTokenizerFast.from_pretrained(str(real_data(f"tokenizers/{MATH}")))
    if name in SHORT:
        backend.chat_template, marks = SHORT[name]
        backend.add_tokens(list(marks), special_tokens=True)
        return backend
    config = json.loads((real_data(f"tokenizers/{name}") / "tokenizer_config.json").read_text())
    for number, token in sorted(config["added_tokens_decoder"].items(), key=lambda kv: int(kv[0])):
        if int(number) >= len(backend):
            backend.add_tokens(AddedToken(**token), special_tokens=token["special"])
        assert backend.convert_tokens_to_ids(token["content"]) == int(number)
    backend.chat_template = config["chat_template"]
    return backend
