"""Planned against fake memory of one rank's step, over shipped configs and layouts.

    python -m benchmarks.plan_fake_world

Each row is one rank of one pipeline stage in the fake world of `stable-opd rehearse`: the peak of
its fake tensors in a whole step, and what planning/memory.py predicts for the same step with
torch's layers. Context parallelism is left out: its torch attention keeps a mask that the plan does
not count (planning/model_size.py).
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: tensors without memory are the CPU's

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.planning.hardware import GIB, Cluster
from stable_opd_mcore.planning.layout import layout_of
from stable_opd_mcore.rehearsal.worlds import rehearse_stage

CONFIGS = Path(__file__).parents[1] / "configs"
LAYERS = 8  # of a model chunk; with more, both figures come closer to each other
NO_TENSOR = "parallel.tensor=1 parallel.sequence=false"
EXPERTS_OF_TWO_STAGES = f"parallel.pipeline=2 {NO_TENSOR} train.recompute=full"
EXPERTS_OF_FOUR_RANKS = (
    "parallel.pipeline=2 parallel.expert=4 parallel.tensor=2 train.recompute=full"
)
ROWS = (  # config, trainer nodes, server nodes, stage, settings
    ("stable_opd_1p5b", 1, 0, 0, ""),
    ("stable_opd_1p5b", 2, 1, 0, "parallel.tensor=2 parallel.sequence=true"),
    ("stable_opd_1p5b", 1, 1, 0, "parallel.tensor=2"),
    ("stable_opd_1p5b", 1, 1, 0, "train.recompute=none train.micro_batch_tokens=8448"),
    ("stable_opd_1p5b", 1, 1, 0, "train.recompute=selective"),
    ("recipes/rethinking_1p5b", 1, 0, 0, ""),
    ("recipes/dr_grpo_1p5b", 1, 0, 0, ""),
    ("sft_1p5b", 1, 0, 0, ""),
    ("stable_opd_7b", 1, 0, 0, ""),
    ("stable_opd_7b", 1, 1, 0, "parallel.tensor=2"),
    ("stable_opd_7b", 2, 1, 0, "parallel.pipeline=2"),
    ("stable_opd_7b", 2, 1, 1, "parallel.pipeline=2"),
    ("stable_opd_7b", 2, 1, 0, "parallel.pipeline=2 parallel.virtual_pipeline=2"),
    ("stable_opd_7b", 4, 1, 3, f"parallel.pipeline=4 {NO_TENSOR} train.micro_batch_tokens=16896"),
    ("recipes/gkd_7b", 1, 0, 0, ""),
    ("recipes/lsm_7b", 1, 0, 0, ""),
    ("sft_7b", 1, 0, 0, ""),
    ("recipes/qwen3_8b_32b", 1, 0, 0, ""),
    ("stable_opd_32b", 4, 2, 0, "parallel.pipeline=2"),
    ("stable_opd_32b", 4, 2, 1, "parallel.pipeline=2"),
    ("stable_opd_32b", 8, 2, 3, "parallel.pipeline=4"),
    ("stable_opd_8b_235b", 2, 2, 0, EXPERTS_OF_TWO_STAGES),
    ("stable_opd_8b_235b", 2, 2, 1, EXPERTS_OF_TWO_STAGES),
    ("stable_opd_30b_a3b", 4, 2, 0, EXPERTS_OF_TWO_STAGES),
    ("stable_opd_30b_a3b", 4, 2, 1, EXPERTS_OF_FOUR_RANKS),
)


def main() -> None:
    warnings.simplefilter("ignore")
    print("| config | settings | layout | stage | plan GiB | fake world GiB | ratio | CPU s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, nodes, server_nodes, stage, settings in ROWS:
        config = load_config(CONFIGS / f"{name}.yaml", settings.split())
        cluster = Cluster(nodes, 8, server_nodes)
        report = rehearse_stage(config, cluster, "h200", stage, LAYERS)
        planned, fake = report.planned_bytes / GIB, report.rank.peak_bytes / GIB
        layout = layout_of(config.parallel, cluster.trainer_gpus)
        print(
            f"| `{Path(name).name}` | {settings.replace('parallel.', '')} | {layout} | "
            f"{stage} | {planned:.1f} | {fake:.1f} | {planned / fake:.3f} | "
            f"{report.rank.seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
