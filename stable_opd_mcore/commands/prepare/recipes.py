"""The data sets that `prepare` knows: where they are on the hub, their columns and their outputs.

A new one is an entry of RECIPES.
"""

from dataclasses import dataclass

from stable_opd_mcore.config.data import ColumnsConfig


@dataclass(frozen=True)
class Recipe:
    hub_id: str | None  # None: --source is needed
    files: tuple[str, ...]  # globs; the first is of the hub; of a folder the first that matches
    columns: ColumnsConfig
    openr1: bool = False  # select generations by OpenR1's verdicts, and split into SFT and OPD
    output: str | None = None  # without the split: the file's name; None: that of the source


_ANY_FILES = ("*.parquet", "*.jsonl")

RECIPES = {
    "openr1": Recipe(
        "open-r1/OpenR1-Math-220k",
        ("data/train-*.parquet", "default/train-*.parquet", *_ANY_FILES),
        ColumnsConfig(),
        openr1=True,
    ),
    "openr1-46k-8192": Recipe(
        "Elliott/Openr1-Math-46k-8192",
        ("data/train-*.parquet", *_ANY_FILES),
        ColumnsConfig(
            problem="prompt.1.content",
            answer="reward_model.ground_truth",
            solution="target.0.content",
        ),
        output="openr1_46k_8192",
    ),
    "gsm8k": Recipe(
        "openai/gsm8k",
        ("main/train-*.parquet", "train*.parquet", "train*.jsonl"),
        ColumnsConfig(problem="question", answer="answer", solution="answer"),
        output="gsm8k_train",
    ),
    "rows": Recipe(None, ("data/train-*.parquet", *_ANY_FILES), ColumnsConfig()),
}
# What the split of OpenR1's rows is written to: the supervised rows, the prompts of the
# distillation, and both together.
SFT, OPD, BOTH = "openr1_sft_33k", "openr1_opd_13k", "openr1_sft_46k"
