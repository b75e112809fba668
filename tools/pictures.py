"""The pictures of the documents: `python -m tools.pictures docs/pictures` writes them as SVG.

A picture is a list of boxes and arrows on a grid of 640 columns, so that its text stays readable on
a telephone. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH = 640
_STYLE = """
  text { font: 17px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; } .small { font-size: 15px; fill: #59636e; }
  .box { fill: #f6f8fa; stroke: #8c959f; } .trainer { fill: #ddf4ff; stroke: #218bff; }
  .server { fill: #fff1e5; stroke: #bc4c00; } .file { fill: #dafbe1; stroke: #1a7f37; }
  .arrow { stroke: #59636e; stroke-width: 2; fill: none; } .head { fill: #59636e; }
  .paper { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .small { fill: #b7bfc9; }
    .box { fill: #151b23; stroke: #656c76; } .trainer { fill: #0c2d6b; stroke: #4493f8; }
    .server { fill: #5a1e02; stroke: #db6d28; } .file { fill: #04260f; stroke: #3fb950; }
    .arrow { stroke: #9198a1; } .head { fill: #9198a1; } .paper { fill: #0d1117; }
  }"""


@dataclass(frozen=True)
class Box:
    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    kind: str = "box"  # box, trainer, server or file

    def svg(self) -> str:
        middle = self.x + self.width / 2
        top = self.y + self.height / 2 - 10.5 * len(self.lines) + 6
        texts = [f'<text class="title" x="{middle}" y="{top}">{escape(self.title)}</text>']
        texts += [
            f'<text class="small" x="{middle}" y="{top + 21 * number}">{escape(line)}</text>'
            for number, line in enumerate(self.lines, start=1)
        ]
        frame = (
            f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}" '
            f'height="{self.height}" rx="8"/>'
        )
        return "\n".join([frame, *texts])


@dataclass(frozen=True)
class Arrow:
    points: tuple[tuple[int, int], ...]
    label: str = ""
    at: tuple[int, int] = (0, 0)  # the label's middle
    anchor: str = "middle"

    def svg(self) -> str:
        path = " ".join(f"{x},{y}" for x, y in self.points)
        line = f'<polyline class="arrow" points="{path}" marker-end="url(#head)"/>'
        if not self.label:
            return line
        lines = [
            f'<text class="small" x="{self.at[0]}" y="{self.at[1] + 19 * number}" '
            f'style="text-anchor: {self.anchor}">{escape(text)}</text>'
            for number, text in enumerate(self.label.split("\n"))
        ]
        return "\n".join([line, *lines])


def picture(title: str, height: int, parts: list[Box | Arrow]) -> str:
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto"><path class="head" d="M0,0 L8,4 L0,8 z"/>'
        "</marker>"
    )
    body = "\n".join(part.svg() for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}\n</style>\n<defs>{head}</defs>\n"
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>\n'
        f'<g text-anchor="middle">\n{body}\n</g>\n</svg>\n'
    )


STEP = picture(
    "The roles of a run and the data of one training step",
    640,
    [
        Box(
            30,
            20,
            250,
            74,
            "Rollout servers",
            ("student, weights of version v",),
            "server",
        ),
        Box(350, 20, 260, 74, "Teacher servers", ("if the teacher is served",), "server"),
        Arrow(((155, 94), (155, 168)), "responses,\nlog-probabilities", (165, 126), "start"),
        Arrow(((485, 94), (485, 168)), "scores of\neach token", (475, 126), "end"),
        Box(
            30,
            170,
            580,
            62,
            "1  Sample",
            ("each data-parallel rank: its share of the prompts",),
            "trainer",
        ),
        Arrow(((320, 232), (320, 266))),
        Box(
            30,
            268,
            580,
            62,
            "2  Share out and pack",
            ("rewards, token weights with global normalisers",),
            "trainer",
        ),
        Arrow(((320, 330), (320, 364))),
        Box(
            30,
            366,
            580,
            62,
            "3  Score",
            ("frozen reference; teacher, if it is not served",),
            "trainer",
        ),
        Arrow(((320, 428), (320, 462))),
        Box(
            30,
            464,
            580,
            62,
            "4  Update",
            ("fused loss: advantages + β KL(reference) + λ golden",),
            "trainer",
        ),
        Arrow(((320, 526), (320, 560))),
        Box(
            30,
            562,
            580,
            62,
            "5  Publish",
            ("weights of version v + 1, verified on each server",),
            "trainer",
        ),
        Arrow(((30, 593), (14, 593), (14, 57), (28, 57))),
    ],
)

PUBLISH = picture(
    "A publish: how new weights reach the rollout servers",
    560,
    [
        Box(30, 20, 260, 62, "Pause", ("hold new requests",), "trainer"),
        Box(350, 20, 260, 62, "Servers", ("end or abort what they sample",), "server"),
        Arrow(((290, 51), (348, 51))),
        Arrow(((480, 82), (480, 104), (160, 104), (160, 126))),
        Box(
            30,
            128,
            260,
            84,
            "Gather a bucket",
            ("whole tensors by name,", "512 MiB at a time"),
            "trainer",
        ),
        Box(350, 128, 260, 84, "Receive", ("CUDA IPC, NCCL, gloo or disk",), "server"),
        Arrow(((290, 170), (348, 170)), "", (0, 0)),
        Arrow(((480, 212), (480, 250), (320, 250), (320, 272))),
        Box(
            30,
            274,
            580,
            62,
            "Verify",
            ("checksums of the trainer's tensors = the server's, to the bit",),
        ),
        Arrow(((320, 336), (320, 370))),
        Box(
            30,
            372,
            580,
            62,
            "Stamp the version",
            ("each response names the version that sampled it",),
            "server",
        ),
        Arrow(((320, 434), (320, 468))),
        Box(
            30,
            470,
            580,
            74,
            "Resume",
            (
                "a server that fails on the way is restarted and gets",
                "the weights again; the step is already finished",
            ),
            "trainer",
        ),
    ],
)

CHECKPOINT = picture(
    "The life of a checkpoint",
    540,
    [
        Box(
            30,
            20,
            580,
            74,
            "Every checkpoint.every steps, and on a signal",
            ("all ranks agree on a step and finish it",),
            "trainer",
        ),
        Arrow(((320, 94), (320, 128))),
        Box(
            30,
            130,
            280,
            104,
            "checkpoints/step_N",
            ("weights, optimizer,", "step, prompts, guard"),
            "file",
        ),
        Box(
            330,
            130,
            280,
            104,
            "manifest.json, last",
            ("size and hash of each file:", "without it, no checkpoint"),
            "file",
        ),
        Arrow(((310, 182), (328, 182))),
        Arrow(((170, 234), (170, 288))),
        Arrow(((470, 234), (470, 288))),
        Box(
            30, 290, 280, 104, "Resume", ("newest complete one,", "any parallel layout"), "trainer"
        ),
        Box(330, 290, 280, 104, "evaluate, convert", ("a checkpoint is also", "a model directory")),
        Arrow(((320, 412), (320, 440))),
        Box(
            30,
            442,
            580,
            78,
            "model/ at the end",
            ("the student in Hugging Face form: transformers, SGLang, vLLM",),
            "file",
        ),
    ],
)

PICTURES = {"step.svg": STEP, "publish.svg": PUBLISH, "checkpoint.svg": CHECKPOINT}

if __name__ == "__main__":
    for name, text in PICTURES.items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
