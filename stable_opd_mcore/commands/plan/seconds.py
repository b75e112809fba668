"""A coarse estimate of a step's seconds: work over an assumed share of the GPU's rates.

Not counted: the pipeline's bubble, the optimizer, the publish of weights, so score and update take
equally long in all layouts. No GPU has confirmed it. It compares values of train.recompute and
memory.offload.
"""

from dataclasses import dataclass

from stable_opd_mcore.commands.plan.memory import stage_plan
from stable_opd_mcore.commands.plan.planned_run import PlannedRun
from stable_opd_mcore.placement.model_size import ModelSize

# Seconds of one decoding step beyond its memory traffic and products.
SGLANG_SECONDS = 0.002  # CUDA graphs
IN_PROCESS_SECONDS = 0.025  # any other engine: Python


@dataclass(frozen=True)
class StepSeconds:
    """Predicted seconds of one step, phase by phase."""

    rollout: float  # the trainer waits for responses
    score: float
    update: float
    offload: float  # copies between GPU and host, of `memory.offload` and of teachers in turn

    @property
    def total(self) -> float:
        return self.rollout + self.score + self.update + self.offload


def step_seconds(run: PlannedRun) -> StepSeconds:
    """One step of the run, evaluation and checkpoints excluded."""
    student, gpus = run.student, run.layout.gpus
    score = sum(
        _forward_flops(run.of_scorer(role), size, run.scored_by(role))
        for role, size in run.frozen.items()
    )
    forward = _forward_flops(run, student, run.sequences)
    model = student.architecture
    mlp = 2 * run.trained_tokens * model.mlp_products
    again = {"none": 0.0, "selective": mlp, "full": forward}[run.config.train.recompute]
    # One product forward; backward one for the input's gradient and, for trained weights, another.
    products = 2 if run.config.student.lora else 3
    heads = products * student.head_flops(run.response_rows)
    heads += sum(
        size.head_flops(run.scored_by(role) * run.work.response_tokens)
        for role, size in run.frozen.items()
    )
    score_seconds = run.device.matmul_seconds(score / gpus)
    update_seconds = run.device.matmul_seconds((products * forward + again + heads) / gpus)
    offload, rollout = _offload_seconds(run) + turn_seconds(run), _rollout_seconds(run)
    if run.config.rollout.has_servers and run.config.rollout.max_staleness:
        rollout = max(0.0, rollout - score_seconds - update_seconds - offload)
    return StepSeconds(rollout, score_seconds, update_seconds, offload)


def _forward_flops(run: PlannedRun, size: ModelSize, sequences: int) -> float:
    return size.forward_flops(sequences * run.work.tokens, run.work.tokens / 2)


def turn_seconds(run: PlannedRun) -> float:
    """Copies of the teachers that take turns to the GPU of the slowest stage, in one step."""
    stages = {0, run.layout.pipeline - 1}
    most = max(sum(run.turn_bytes(stage)) for stage in stages)
    return run.config.train.minibatches * run.device.host_seconds(most)


def _offload_seconds(run: PlannedRun) -> float:
    """Copies between GPU and host on the slowest stage; no copy overlaps with work.

    `optimizer` and `student` go and come once a step, `gradients` are filled with zeros instead,
    and frozen models come from the copy that stays on the host.
    """
    copies = {"optimizer": 2, "student": 2, "frozen": 1}
    stages = (stage_plan(run, stage) for stage in {0, run.layout.pipeline - 1})
    return max(
        sum(
            copies.get(part, 0) * run.device.host_seconds(plan.bytes_of(part))
            for part in set(run.config.offloaded)
        )
        for plan in stages
    )


def _rollout_seconds(run: PlannedRun) -> float:
    """One step's responses: weights are read once a decoding step, caches once a token."""
    config, student, device, work = run.config, run.student, run.device, run.work
    if not run.rollouts or config.rollout.engine == "replay":
        return 0.0
    if run.topology.placement is None:  # the embedded engine's replicas
        servers, tensor = run.layout.gradient_ranks, run.layout.tensor * run.layout.pipeline
    else:
        servers = len(run.topology.servers)
        tensor = run.topology.tensor or config.rollout.sglang.tensor or 1  # 1: not known
    sequences = run.rollouts / servers
    tokens = sequences * work.response_tokens
    weights = 2 * student.read_parameters(sequences) / tensor
    context = (work.prompt_tokens + work.tokens) / 2  # mean length while a token is sampled
    caches = tokens * context * student.kv_bytes(tensor=tensor)
    products = 2 * student.read_parameters(1) * sequences * work.tokens / tensor
    overhead = SGLANG_SECONDS if config.rollout.has_servers else IN_PROCESS_SECONDS
    decoding = run.longest_sampled * (overhead + device.memory_seconds(weights))
    return decoding + device.memory_seconds(caches) + device.matmul_seconds(products)
