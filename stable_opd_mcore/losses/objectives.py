"""Every objective by name: its function, the leaves and scores it needs, and its settings. Which
source of data.train has which: source_objectives.py.

CONTRIBUTING.md, "Add an objective", has the four edits. The tests compare the fused path of every
entry of OBJECTIVES with the loss on whole distributions, and docs/objectives.md with its summaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.config.no_effect import refuse_unused_of_source, refuse_without_effect
from stable_opd_mcore.config.objective_settings import AdvantageConfig, ObjectiveConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.host.user_code import is_user_function
from stable_opd_mcore.losses import token_losses, token_weights
from stable_opd_mcore.losses.fused import fused_loss
from stable_opd_mcore.losses.output_head import Head, rows_per_block
from stable_opd_mcore.losses.own_objective import own_objective
from stable_opd_mcore.losses.stop_tokens import shared_stop_ids
from stable_opd_mcore.losses.token_losses import Divergence, PolicyLoss, Rows, Terms
from stable_opd_mcore.records import LossOutput, MicroBatch
from stable_opd_mcore.sample_facts import SampleFacts, SampleWeights

# "topk" includes "sampled". "hidden" is hidden states only: the loss computes the rest.
ScoresNeeded = Literal["none", "sampled", "topk", "hidden"]


@dataclass(frozen=True)
class ObjectiveSpec:
    """One entry of OBJECTIVES."""

    policy: Callable[[Rows, ObjectiveConfig], PolicyLoss] | None  # None: no policy term
    teacher: ScoresNeeded
    settings: tuple[str, ...] = ()  # keys of `objective` that it uses, in addition to `masks`
    divergence: Callable[[ObjectiveConfig], Divergence] | None = None  # Terms.divergence
    discounted: Callable[[Rows, AdvantageConfig], Tensor] | None = None  # Terms.discounted
    rewards: bool = False  # advantages come from graded rollouts
    # The policy term of a rollout that no teacher scores; None: it has none
    untaught: Callable[[Rows, ObjectiveConfig], PolicyLoss] | None = None
    summary: str = ""  # the loss of a token, in Markdown: a cell of the table in docs/objectives.md
    source: str = ""  # a paper of docs/method.md


_SURROGATE = ("clip", "advantage.clamp")
_OF_REWARDS = (*_SURROGATE, "std_normalise")

OBJECTIVES: dict[str, ObjectiveSpec] = {
    "sft": ObjectiveSpec(
        None, "none", summary="negative log-likelihood of golden solutions; there are no rollouts"
    ),
    "grpo": ObjectiveSpec(
        token_losses.grpo,
        "none",
        settings=_OF_REWARDS,
        rewards=True,
        summary="clipped surrogate of the group-normalised reward; `std_normalise: false` with "
        "`aggregation: constant` is Dr.GRPO",
        source="LUFFY",
    ),
    "opd": ObjectiveSpec(
        token_losses.opd,
        "sampled",
        settings=(
            *_SURROGATE,
            "discount",
            "stop_class",
            "advantage.control_variate",
            "advantage.log",
            "advantage.policy",
            "advantage.power",
        ),
        discounted=token_losses.from_teacher,
        summary="clipped surrogate of log π_teacher - log π_old of the sampled token; "
        "with `kl.beta` > 0 and `mixture.lambda` > 0 it is **Stable-OPD**",
        source="TML, SO",
    ),
    "grpo_opd": ObjectiveSpec(
        token_losses.grpo_opd,
        "sampled",
        settings=(*_OF_REWARDS, "stop_class", "advantage.policy", "advantage.teacher_weight"),
        rewards=True,
        untaught=token_losses.grpo,
        summary="clipped surrogate of the advantages of `grpo` and `opd` together, the latter "
        "times `advantage.teacher_weight`",
        source="ours",
    ),
    "lsm": ObjectiveSpec(
        token_losses.divergence_from_teacher,
        "topk",
        settings=("stop_class", "tail", "top_k"),
        divergence=lambda settings: "teacher_support",
        summary="KL(student ‖ teacher), both renormalised on the teacher's top K tokens",
        source="LSM",
    ),
    "student_topk": ObjectiveSpec(
        token_losses.divergence_from_teacher,
        "hidden",
        settings=("stop_class", "tail", "top_k"),
        divergence=lambda settings: "student_support",
        summary="KL(student ‖ teacher), both renormalised on the student's top K tokens",
        source="RE",
    ),
    "gkd": ObjectiveSpec(
        token_losses.divergence_from_teacher,
        "hidden",
        settings=("stop_class", "divergence", "jsd_beta", "on_policy_fraction"),
        divergence=lambda settings: settings.divergence,
        summary="`divergence` over the whole vocabulary: reverse KL, forward KL or JSD; "
        "`on_policy_fraction` of the prompts are trained on rollouts, the others on golden "
        "solutions",
        source="GKD",
    ),
}


_REFERENCE_NEEDS: dict[str, ScoresNeeded] = {"none": "none", "exact": "hidden"}


LIKELIHOOD = Terms()  # micro-batches that no other model scores


@dataclass(frozen=True)
class Objective:
    """A configured objective: weights for the global batch, and the loss of a micro-batch."""

    name: str
    teacher_needs: ScoresNeeded  # what `microbatch.teacher` must carry
    reference_needs: ScoresNeeded  # what `microbatch.reference` must carry
    top_k: int  # tokens per row when teacher_needs is "topk"
    needs_rollouts: bool  # False: only golden solutions are trained on
    needs_golden: bool  # golden solutions must be among the samples
    needs_rewards: bool  # rollouts must be graded before weighting
    stop_ids: tuple[int, ...]  # one outcome in scores of student and teacher, not the reference
    terms: Terms
    untaught: Terms  # of rollouts that no teacher scores; equal where it asks no teacher
    beta: float  # weight of the KL to the reference
    golden_weight: float  # weight of the golden solutions' likelihood: lambda; 1 for sft
    config: Config  # the run's; `terms.settings` is its section `objective`, or a source's own
    teacher: str | None = None  # see Config.teacher_of

    def with_loss_weights(self, beta: float, lambda_: float) -> Objective:
        """A copy with other weights: beta 0 needs no reference, lambda 0 no golden solutions."""
        if not self.needs_rollouts:
            return self
        settings = self.terms.settings
        reference = self.config.kl.estimator if beta else "none"
        terms = replace(self.terms, reference=reference)
        return replace(
            self,
            terms=terms,
            untaught=replace(self.untaught, reference=reference),
            reference_needs=_REFERENCE_NEEDS.get(terms.reference, "sampled"),
            needs_golden=lambda_ > 0 or (self.name == "gkd" and settings.on_policy_fraction < 1),
            beta=beta,
            golden_weight=lambda_,
        )

    @property
    def trains_untaught(self) -> bool:
        """Whether a rollout that no teacher scores has a policy term."""
        return self.untaught.policy is not None

    def terms_of(self, microbatch: MicroBatch) -> Terms:
        """What the loss of a micro-batch is made of."""
        if not microbatch.is_scored:
            return LIKELIHOOD
        return self.terms if microbatch.is_taught else self.untaught

    @property
    def temperature(self) -> float:
        """The sampling temperature, of all log-probabilities but those of golden solutions (1)."""
        return self.terms.temperature

    def sample_weights(self, facts: SampleFacts) -> SampleWeights:
        """Weights of all ranks' samples of a minibatch; UserError if grpo lacks a reward."""
        if self.config.normaliser == "per_source":
            weights = [source.weight for source in self.config.data.sources]
            return token_weights.per_source(facts, lambda _, own: self.weights_of(own), weights)
        return self.weights_of(facts)

    def weights_of(self, facts: SampleFacts) -> SampleWeights:
        """Weights of samples that are normalised together, all of a minibatch or of one source."""
        config = self.config
        episodes, episode_B = token_weights.by_episode(facts)
        advantage_B = None
        if self.needs_rewards:
            advantage_B = token_weights.group_advantages(
                episodes, self.terms.settings.std_normalise
            )
        weights = token_weights.episode_weights(
            episodes,
            policy_B=(episodes.golden_B == episodes.off_policy_B) & self.needs_rollouts,
            aggregation=config.aggregation,
            max_tokens=config.longest_episode,
            beta=self.beta,
            sft_weight=self.golden_weight,
            advantage_B=advantage_B,
        )
        return weights.select(episode_B)

    def __call__(
        self,
        hidden_NH: Tensor,
        head: Head,
        microbatch: MicroBatch,
        *,
        teacher_head: Head | None = None,
        reference_head: Head | None = None,
        context_group: dist.ProcessGroup | None = None,
    ) -> LossOutput:
        """The summed loss of one micro-batch, differentiable in hidden_NH and head.weight_VH.

        Args:
            teacher_head: where teacher_needs is "hidden"; cut at the student's shard boundaries
                (align_head).
            context_group: ranks that hold the other slices of the micro-batch's sequences.

        Raises:
            ValueError: heads do not fit, naming which.
        """
        return fused_loss(
            hidden_NH,
            head,
            microbatch,
            self.terms_of(microbatch),
            teacher_head=teacher_head,
            reference_head=reference_head,
            context_group=context_group,
            block_rows=rows_per_block(head),
        )


def build_objective(
    config: Config,
    student_stop_ids: Sequence[int],
    teacher_stop_ids: Sequence[int] | None,
    settings: ObjectiveConfig | None = None,
) -> Objective:
    """An objective of a run; teacher_stop_ids is None without a teacher.

    settings: a source's own; None: `config.objective`.

    Raises:
        ConfigError: an unknown name, options that do not go together, or a function of the user's
            own that fails on a trial.
    """
    settings = settings or config.objective
    spec = OBJECTIVES.get(settings.name) or _own_spec(settings)
    if spec.teacher != "none" and config.teacher is None:
        raise ConfigError(f"objective.name={settings.name} needs a teacher: set teacher.path")
    _refuse_unused(config)
    stop_ids: tuple[int, ...] = ()
    if settings.stop_class and spec.teacher != "none" and teacher_stop_ids is not None:
        stop_ids = shared_stop_ids(student_stop_ids, teacher_stop_ids)
    stale = config.rollout.max_staleness > 0
    terms = Terms(
        policy=spec.policy,
        discounted=spec.discounted,
        divergence=None if spec.divergence is None else spec.divergence(settings),
        settings=settings.model_copy(update={"advantage": settings.advantage.resolved(stale)}),
        temperature=config.sampling.temperature,
        stop_ids=stop_ids,
    )
    supervised = settings.name == "sft"
    return Objective(
        name=settings.name,
        teacher_needs="hidden" if terms.teacher_logits else spec.teacher,
        reference_needs="none",
        top_k=settings.top_k,
        needs_rollouts=not supervised,
        needs_golden=supervised,
        needs_rewards=spec.rewards,
        stop_ids=stop_ids,
        terms=terms,
        untaught=terms if spec.teacher == "none" else _untaught(terms, spec),
        beta=0.0,
        golden_weight=1.0,
        config=config,
    ).with_loss_weights(config.kl.beta, config.mixture.lambda_)


def _untaught(terms: Terms, spec: ObjectiveSpec) -> Terms:
    """The terms without those that read a teacher's scores."""
    advantage = terms.settings.advantage.model_copy(update={"control_variate": False})
    settings = terms.settings.model_copy(update={"advantage": advantage})
    nothing = {"discounted": None, "divergence": None, "settings": settings}
    return replace(terms, policy=spec.untaught, **nothing)


def _own_spec(settings: ObjectiveConfig) -> ObjectiveSpec:
    """The entry of a function of the user's own (docs/own_code.md)."""
    if not is_user_function(settings.name):
        raise ConfigError(
            f"objective.name={settings.name!r}: expected one of {', '.join(OBJECTIVES)}, or "
            "path/to/file.py:function"
        )
    needs, advantage = settings.needs, ("advantage.clamp", "advantage.log", "advantage.power")
    used = ["clip", *advantage, "advantage.policy", "advantage.teacher_weight"]
    teacher: ScoresNeeded = "sampled" if "teacher_logprob" in needs else "none"
    divergence: Divergence | None = None
    if "support" in needs:
        teacher, divergence = "topk", "teacher_support"
        used.append("top_k")
    if "divergence" in needs:
        teacher, divergence = "hidden", settings.divergence
        used += ["divergence", "jsd_beta"]
    if "given_advantage" in needs:
        used.append("std_normalise")
    if teacher != "none":
        used.append("stop_class")
    return ObjectiveSpec(
        own_objective(settings),
        teacher,
        tuple(used),
        None if divergence is None else (lambda _: divergence),
        rewards="given_advantage" in needs,
    )


def _refuse_unused(config: Config) -> None:
    """Refuse settings that no objective of the run reads, and those that a source sets for an
    objective that does not read them.
    """
    of_objectives = {f"objective.{key}" for each in OBJECTIVES.values() for key in each.settings}
    specs = [OBJECTIVES.get(each.name) or _own_spec(each) for each in config.objectives]
    used = [{f"objective.{key}" for key in spec.settings} for spec in specs]
    names = [f"objective.name={each.name}" for each in config.objectives]
    reason = f"{' or '.join(names)} has no use for it"
    refuse_without_effect(config, dict.fromkeys(of_objectives.difference(*used), reason))
    for name, settings, of_source in zip(names, config.objectives, used, strict=True):
        refuse_unused_of_source(config, settings, of_objectives - of_source, name)
