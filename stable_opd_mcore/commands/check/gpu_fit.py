"""Whether models, servers and a step fit the GPUs; the precision of weights and servers."""

from collections.abc import Iterator

from stable_opd_mcore.commands.check.finding import Finding, finding
from stable_opd_mcore.commands.plan.plan import Plan, make_plan
from stable_opd_mcore.commands.plan.planned_run import plan_topology
from stable_opd_mcore.inputs.loading import (
    refuse_prefixes_of_delta_nets,
    refuse_routing_without_experts,
    refuse_unused_expert_ranks,
)
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.layers.fp8 import refuse_fp8
from stable_opd_mcore.placement.hardware import DEVICES, GIB
from stable_opd_mcore.placement.layout import layout_of, refuse_layout


def plan_of(inputs: RunInputs) -> Plan | None:
    """The plan of `stable-opd plan`; None where the GPU or its memory is not known."""
    place = inputs.place
    if place is None or place.gpu not in DEVICES:
        return None
    return make_plan(inputs.config, place.cluster, place.gpu)


def layout(inputs: RunInputs) -> None:
    """Models that do not fit these ranks, in FP8 too; expert ranks without experts; GPUs that the
    ranks do not divide.
    """
    config, parallel, place = inputs.config, inputs.config.parallel, inputs.place
    models: dict[str, Architecture] = {role: own for role, (_, own) in inputs.models.items()}
    models["reference"] = inputs.architecture
    precision = config.train.precision if place is not None and place.on_gpu else None
    for role, model in models.items():
        refuse_layout(role, model, parallel)
        if fp8 := config.fp8.of(role):
            refuse_fp8(model, fp8, tensor=parallel.tensor, precision=precision)
    refuse_unused_expert_ranks(config, inputs.architecture)
    refuse_routing_without_experts(config, inputs.architecture)
    refuse_prefixes_of_delta_nets(config, inputs.architecture)
    if place is not None:
        layout_of(parallel, place.cluster.trainer_gpus)
        if place.gpu in DEVICES or not place.on_gpu:
            plan_topology(config, place.cluster, place.gpu)


def facts(inputs: RunInputs) -> list[str]:
    """The memory that the plan predicts, as a line."""
    layout(inputs)
    plan = plan_of(inputs)
    if plan is None:
        return []
    memory, gpu = plan.memory, plan.run.device.name
    return [
        f"memory by `stable-opd plan`: {memory.peak_bytes / GIB:.1f} of "
        f"{memory.usable_bytes / GIB:.1f} GiB of a {gpu}, in the {memory.peak_phase} phase"
    ]


def memory(inputs: RunInputs) -> Iterator[Finding]:
    """A step that exceeds the GPU's memory, by `stable-opd plan`.

    An error if only other GPUs or another layout help; else a warning, because the plan is an
    estimate.
    """
    if inputs.place is None or not inputs.place.on_gpu:
        return
    if inputs.place.gpu not in DEVICES:
        yield finding("unknown-gpu", gpu=inputs.place.gpu, known=", ".join(DEVICES))
        return
    plan = plan_of(inputs)
    if plan is None or plan.memory.fits:
        return
    has_remedy = plan.largest_micro_batch or plan.choice.best.memory.fits
    yield finding(
        "memory" if has_remedy else "memory-for-good",
        phase=plan.memory.peak_phase,
        needed=plan.memory.peak_bytes / GIB,
        gpu=plan.run.device.name,
        usable=plan.memory.usable_bytes / GIB,
        remedies=plan.remedy,
    )


def precision(inputs: RunInputs) -> Iterator[Finding]:
    """A model that loses bits when it is loaded; responses sampled in another precision."""
    config = inputs.config
    trained = {"fp32": "float32", "bf16": "bfloat16"}[config.train.precision]
    loaded = {role: (settings.path, model) for role, (settings, model) in inputs.models.items()}
    if config.largest_beta:
        own = inputs.reference_architecture or inputs.architecture
        loaded["reference"] = config.reference.path, own
    for role, (path, model) in loaded.items():
        if config.train.precision == "bf16" and path is not None:
            # imports Megatron, which takes seconds
            from stable_opd_mcore.models.files.huggingface import stored_dtypes

            stored = stored_dtypes(path, model)
            if stored - {"BF16"}:
                yield finding("loses-bits", role=role, stored=", ".join(sorted(stored)))
    if inputs.objective.needs_rollouts and config.fp8.student is not None:
        yield finding("sampled-without-fp8", fp8=config.fp8.student, trained=trained)
