"""`stable-opd rehearse`: configs in worlds of several sizes, a line for every pipeline stage.

A world that the layout does not divide is skipped and said. Refused are worlds whose memory, layout
or servers do not fit, with the numbers and the remedy. The fake world has the torch layers of a
CPU, so its memory is held against the plan for these; the plan for Transformer Engine's layers is
held against the GPU. Not here: one rank (rank.py), Transformer Engine's own layers (te_layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stable_opd_mcore.config.models import TeacherConfig
from stable_opd_mcore.config.schema import Config, ModelConfig
from stable_opd_mcore.data.chat import SYNTHETIC, Tokenizer
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.families import read_fields
from stable_opd_mcore.planning.hardware import GIB
from stable_opd_mcore.planning.known_models import model_source
from stable_opd_mcore.planning.layout import Layout, layout_of
from stable_opd_mcore.planning.memory import Models, stage_plan
from stable_opd_mcore.planning.plan import Cluster, Plan, make_plan, read_models
from stable_opd_mcore.planning.work import Work
from stable_opd_mcore.rehearsal import te_layers
from stable_opd_mcore.rehearsal.rank import rehearse_rank

PROMPT_TOKENS = 256  # of every prompt, fewer where the window leaves less
# Of a model chunk with experts: the CPU takes each expert of each layer alone, and all are alike.
LAYERS_WITH_EXPERTS = 2


@dataclass(frozen=True)
class StageReport:
    """One rank of one stage. The fake world and `planned_bytes` have the torch layers."""

    stage: int
    layers: int | None  # of the stage, where fewer than the config's are rehearsed
    seconds: float
    fake_bytes: float  # peak of the rehearsed step
    planned_bytes: float  # of the same step
    gpu_bytes: float  # planned for the whole step on the GPU
    usable_bytes: float  # of the GPU
    host_waits: dict[str, int]  # places where the rehearsed step's host waits for the GPU

    @property
    def line(self) -> str:
        fake, planned, gpu, usable = (
            f"{value / GIB:.1f}"
            for value in (self.fake_bytes, self.planned_bytes, self.gpu_bytes, self.usable_bytes)
        )
        cut = "" if self.layers is None else f" (layers: {self.layers})"
        return (
            f"stage {self.stage}  {self.seconds:5.1f} s  fake world{cut} {fake}, "
            f"plan {planned} GiB; on the GPU {gpu} of {usable} GiB; {self.waits}  ok"
        )

    @property
    def waits(self) -> str:
        """How often the host waits for the GPU in the rehearsed step, and where."""
        places = ", ".join(
            place + (f" x {count}" if count > 1 else "") for place, count in self.host_waits.items()
        )
        return f"the host waits {sum(self.host_waits.values())} times: {places}"


def rehearse_worlds(
    configs: Sequence[Config],
    clusters: Sequence[Cluster],
    gpu: str,
    tell: Callable[[str], None],
    layers: int | None = None,
) -> bool:
    """Rehearse every config in every world; whether none was refused.

    A config that no world divides counts as refused. `layers`: see rehearse_stage.
    """
    tell(_layers())
    passed = True
    for config in configs:
        config, notes = with_known_models(config)
        for note in notes:
            tell(f"{config.run.name}: {note}")
        divided = False
        for cluster in clusters:
            name = f"{config.run.name}  {cluster.nodes} x {cluster.gpus_per_node} {gpu}"
            try:
                layout = layout_of(config.parallel, cluster.trainer_gpus)
            except UserError as error:
                tell(f"{name}  skipped: {error}")
                continue
            divided = True
            try:
                for stage in range(layout.pipeline):
                    report = rehearse_stage(config, cluster, gpu, stage, layers)
                    tell(f"{name}  {layout}  {report.line}{_idle(config, layout)}")
                if te_layers.is_installed():
                    tell(f"{name}  {layout}  {_compare_layers(config, cluster, layout, layers)}")
            except UserError as error:
                passed = False
                tell(f"{name}  {layout}  REFUSED: {error}")
        if not divided:
            passed = False
            tell(f"{config.run.name}: REFUSED: no world is divided by its layout")
    return passed


def rehearse_stage(
    config: Config,
    cluster: Cluster,
    gpu: str,
    stage: int,
    layers: int | None = None,
) -> StageReport:
    """The first rank of one pipeline stage; the config's models must be readable.

    Models are cut to `layers` layers a model chunk; None: those with experts to
    LAYERS_WITH_EXPERTS, and others not at all.

    Raises:
        UserError: layout, memory, lengths or servers do not fit.
    """
    models = read_models(config)
    work = longest_work(config, models)
    plan = make_plan(config, cluster, gpu, work)
    _require_fit(plan)
    vocab_size = _vocabulary(config)
    config, of_stage = with_few_layers(config, models, plan.layout, layers)
    config = with_few_prompts(config, plan.layout, work)
    models = read_models(config)
    planned = stage_plan(config, models, plan.layout, stage, plan.device, work, "torch")
    rank = stage * (cluster.trainer_gpus // plan.layout.pipeline)
    report = rehearse_rank(
        config,
        cluster.trainer_gpus,
        rank,
        prompt_tokens=work.prompt_tokens,
        vocab_size=vocab_size,
    )
    return StageReport(
        stage=report.stage,
        layers=of_stage,
        seconds=report.seconds,
        fake_bytes=report.peak_bytes,
        planned_bytes=planned.rehearsed_bytes,
        gpu_bytes=plan.memory.peak_bytes,
        usable_bytes=plan.memory.usable_bytes,
        host_waits=report.host_waits,
    )


def _compare_layers(config: Config, cluster: Cluster, layout: Layout, layers: int | None) -> str:
    """As te_layers.compare_layers, on the ranks and with the layers that are rehearsed."""
    config, _ = with_few_layers(config, read_models(config), layout, layers)
    gpus = cluster.trainer_gpus
    ranks = [stage * (gpus // layout.pipeline) for stage in range(layout.pipeline)]
    return te_layers.compare_layers(config, gpus, ranks)


def longest_work(config: Config, models: Models) -> Work:
    """Every response at the limit.

    Raises:
        UserError: responses leave no room for a prompt, or exceed a micro-batch.
    """
    window, response = models.student.max_positions, config.sampling.max_new_tokens
    if response >= window:
        raise UserError(
            f"sampling.max_new_tokens={response} leaves no prompt in the student's window of "
            f"{window} positions: lower it below {window}, or raise student.window"
        )
    prompt = min(PROMPT_TOKENS, window - response)
    budget = config.train.micro_batch_tokens
    if budget < prompt + response:
        raise UserError(
            f"train.micro_batch_tokens={budget} is less than the longest sequence, {prompt} prompt "
            f"tokens + sampling.max_new_tokens={response}, which would exceed the budget: set "
            f"train.micro_batch_tokens={prompt + response} or more, or lower "
            "sampling.max_new_tokens"
        )
    return Work(prompt_tokens=prompt, response_tokens=response)


def with_few_prompts(config: Config, layout: Layout, work: Work) -> Config:
    """One prompt a minibatch, with as many responses as fill the pipeline's micro-batches.

    Later micro-batches take the same memory. A micro-batch that is not full would take less than
    the plan counts. Supervised fine-tuning has one sequence a prompt, and so as many prompts.

    The budget becomes what whole sequences fill of it, which is what packing makes and plan counts.
    Nothing is offloaded: fake storages cannot move to the host.
    """
    length = work.prompt_tokens + work.response_tokens
    in_micro_batch = config.train.micro_batch_tokens // length
    minibatches = config.train.minibatches
    of_rank = work.sequences(config) // layout.data // minibatches
    if of_rank > in_micro_batch:
        micro_batches = min(of_rank // in_micro_batch, layout.pipeline * layout.virtual)
        of_rank = micro_batches * in_micro_batch
    sequences = max(1, of_rank) * layout.data  # of a minibatch
    golden = work.sequences(_with(config, 1)) - config.rollout.samples_per_prompt
    if config.objective.name == "sft":
        config = _with(config, minibatches * sequences)
    else:
        config = _with(config, minibatches, max(1, sequences - golden))
    train = config.train.model_copy(update={"micro_batch_tokens": in_micro_batch * length})
    memory = config.memory.model_copy(update={"offload": ()})
    return config.model_copy(update={"train": train, "memory": memory})


def with_few_layers(
    config: Config, models: Models, layout: Layout, layers: int | None
) -> tuple[Config, int | None]:
    """As rehearse_stage cuts the models; and how many layers a stage then has.

    None: no model was cut.
    """
    chunks, cut = layout.pipeline * layout.virtual, None
    changes: dict[str, ModelConfig] = {}
    for name, model in (("student", config.student), ("teacher", config.teacher)):
        size = getattr(models, name)
        if model is None or size is None or (layers is None and size.experts is None):
            continue
        of_chunk = layers or LAYERS_WITH_EXPERTS
        if size.num_layers > of_chunk * chunks:
            fields = read_fields(model_source(model, name)[0])[1]
            fields = {**fields, "num_hidden_layers": of_chunk * chunks}
            changes[name] = model.model_copy(update={"path": None, "architecture": fields})
            cut = of_chunk * layout.virtual
    return config.model_copy(update=changes), cut


def _with(config: Config, prompts: int, samples: int | None = None) -> Config:
    changes = {"prompts_per_step": prompts}
    if samples is not None:
        changes["samples_per_prompt"] = samples
    rollout = config.rollout.model_copy(update=changes)
    return config.model_copy(update={"rollout": rollout})


def with_known_models(config: Config) -> tuple[Config, list[str]]:
    """The config with published sizes in place of absent model directories, and what was replaced.

    Raises:
        UserError: a directory is absent, and its model is not known.
    """
    changes, notes = {}, []
    for name, model in (("student", config.student), ("teacher", config.teacher)):
        if model is None or (isinstance(model, TeacherConfig) and model.engine == "sglang"):
            continue
        source, note = model_source(model, name)
        if note is not None:
            notes.append(note)
            changes[name] = model.model_copy(update={"path": None, "architecture": source})
    return config.model_copy(update=changes), notes


def _require_fit(plan: Plan) -> None:
    if plan.memory.fits:
        return
    needed, usable = plan.memory.peak_bytes / GIB, plan.memory.usable_bytes / GIB
    raise UserError(
        f"memory does not fit: {needed:.1f} GiB are needed in the {plan.memory.peak_phase} phase, "
        f"{usable:.1f} GiB of a {plan.device.name} are usable: set {plan.remedy}"
    )


def _vocabulary(config: Config) -> int:
    """Entries of the tokenizer; where it is absent, of the smallest model."""
    path = config.tokenizer.path or config.student.path
    if path is not None and (path == SYNTHETIC or (Path(path) / "tokenizer.json").is_file()):
        return Tokenizer.load(path, config.student.stop_token_ids).vocab_size
    models = read_models(config)
    return min(m.vocab_size for m in (models.student, models.teacher) if m is not None)


def _idle(config: Config, layout: Layout) -> str:
    idle = layout.data - Work().sequences(config)
    return f" ({idle} of {layout.data} data-parallel ranks have no sequence)" if idle > 0 else ""


def _layers() -> str:
    state = "not installed, so its layers are not built"
    if te_layers.is_installed():
        state = "installed, and its layers are built and compared with torch's"
    return (
        f"Transformer Engine is {state}. It computes on GPUs only: the rehearsed step has torch's "
        "layers, and the plan for the GPU counts Transformer Engine's"
    )
