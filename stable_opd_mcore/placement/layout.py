"""How the trainer's GPUs divide into tensor, pipeline, context and data ranks.

The same arithmetic as parallel/world.py, without a process group. Not here: what a rank holds
(model_size.py, commands/plan/memory.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.description.layout_refusal import divisors, layout_refusal


@dataclass(frozen=True)
class Layout:
    """Ranks per dimension. `data` counts replicas that read micro-batches of their own."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # model chunks per pipeline rank
    context: int = 1
    sequence: bool = False  # sequence parallelism over the tensor ranks
    expert: int = 1  # ranks of a pipeline stage; each holds a part of the experts

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which gradients are summed and the optimizer is sharded."""
        return self.data * self.context

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same experts: their gradients are summed over these."""
        return self.tensor * self.data * self.context // self.expert

    def __str__(self) -> str:
        parts = [f"TP{self.tensor}", f"PP{self.pipeline}", f"CP{self.context}", f"DP{self.data}"]
        parts += [f"EP{self.expert}"] if self.expert > 1 else []
        return " x ".join(parts) + (f", {self.virtual} chunks a stage" if self.virtual > 1 else "")


def layout_of(parallel: ParallelConfig, gpus: int) -> Layout:
    """The config's layout on this many trainer GPUs."""
    replica = parallel.tensor * parallel.pipeline * parallel.context
    if gpus % replica:
        raise UserError(
            f"parallel.tensor={parallel.tensor} x parallel.pipeline={parallel.pipeline} x "
            f"parallel.context={parallel.context} = {replica} does not divide {gpus} trainer GPUs: "
            f"take a multiple of {replica}, or lower one of them"
        )
    if gpus // parallel.pipeline % parallel.expert:
        raise UserError(
            f"parallel.expert={parallel.expert} does not divide the {gpus // parallel.pipeline} "
            f"GPUs of each of {parallel.pipeline} pipeline stages: lower it, or take more GPUs"
        )
    return Layout(
        gpus=gpus,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual_pipeline or 1,
        context=parallel.context,
        sequence=parallel.sequence,
        expert=parallel.expert,
    )


def refusal(architecture: Architecture, parallel: ParallelConfig) -> str | None:
    """Why the model does not fit this layout; None if it does."""
    return layout_refusal(
        architecture,
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_pipeline or 1,
        context=parallel.context,
        expert=parallel.expert,
        sequence=parallel.sequence,
    )


def refuse_layout(role: str, architecture: Architecture, parallel: ParallelConfig) -> None:
    """Raise a UserError if the model does not fit this layout."""
    if reason := refusal(architecture, parallel):
        raise UserError(f"the {role} does not fit the layout: {reason}")


def valid_layouts(
    architectures: Sequence[Architecture], gpus: int, gpus_per_node: int
) -> Iterator[ParallelConfig]:
    """Every layout that holds all models, tensor ranks within a node; one chunk a stage."""
    for tensor in divisors(gpus_per_node):
        for pipeline in divisors(gpus // tensor if gpus % tensor == 0 else 1):
            for context in divisors(gpus // (tensor * pipeline)):
                if gpus % (tensor * pipeline * context) or context > gpus_per_node:
                    continue
                for expert in _expert_sizes(architectures, gpus // pipeline, tensor):
                    parallel = ParallelConfig(
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        sequence=tensor > 1,
                        expert=expert,
                    )
                    if all(refusal(model, parallel) is None for model in architectures):
                        yield parallel


def _expert_sizes(architectures: Sequence[Architecture], ranks: int, tensor: int) -> list[int]:
    """Values of parallel.expert for the ranks of a stage: whole replicas, or equal parts of one."""
    if all(model.experts is None for model in architectures):
        return [1]
    return [n for n in divisors(ranks) if n % tensor == 0 or tensor % n == 0]
