"""The experts of a layer, as config.json describes them."""

from __future__ import annotations

from dataclasses import dataclass

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.config_fields import Fields
from stable_opd_mcore.models.description.families import Family


@dataclass(frozen=True)
class Experts:
    """The MLPs of a layer, of which a router chooses some for each token."""

    number: int
    per_token: int
    normalised: bool  # the probabilities of a token's chosen experts are divided by their sum
    shared_width: int | None  # width of the expert that every token passes; None: no such expert
    scale: float = 1.0  # what the probabilities are multiplied by
    num_groups: int = 1  # of equally many experts; a token's experts are of its best groups
    groups_per_token: int = 1


def read_experts(fields: Fields, family: Family) -> Experts:
    """The experts of a mixture.

    Raises:
        UserError: more experts a token than there are, one whose router is not trained, or groups
            that do not suit.
    """
    # transformers 5 writes num_local_experts; published files have num_experts.
    key = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    if family.shared_name == "shared_experts":  # DeepSeek's names
        key = "n_routed_experts"
    number = fields.count(key)
    per_token = fields.count("num_experts_per_tok")
    if per_token > number:
        raise UserError(
            f"{fields.origin}: num_experts_per_tok={per_token} exceeds {key}={number}; correct it"
        )
    normalised = fields.flag("norm_topk_prob")
    if per_token == 1 and normalised:
        always = family.supported.get("norm_topk_prob") is True
        why = f"which every {fields.values['model_type']} does" if always else "norm_topk_prob=true"
        raise UserError(
            f"{fields.origin}: num_experts_per_tok=1 is not supported where the weights of a "
            f"token's experts are divided by their sum ({why}): the weight of the only one is 1 "
            "whatever the router says, which is then not trained; take another model"
        )
    if family.shared_name == "shared_experts":
        shared = fields.count("n_shared_experts") * fields.count("moe_intermediate_size")
        scale = fields.number("routed_scaling_factor", 1.0)
        groups = _groups(fields, number, per_token) if family.scored_router else (1, 1)
        return Experts(number, per_token, normalised, shared, scale, *groups)
    return Experts(
        number,
        per_token,
        normalised=normalised,
        shared_width=(
            fields.count("shared_expert_intermediate_size") if family.shared_expert else None
        ),
    )


def _groups(fields: Fields, number: int, per_token: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token's experts are of."""
    groups, best = fields.count("n_group"), fields.count("topk_group")
    fits = number % groups == 0 and best <= groups and per_token <= best * (number // groups)
    if groups > 1 and not (fits and number // groups > 1):
        raise UserError(
            f"{fields.origin}: n_group={groups} and topk_group={best} do not suit "
            f"n_routed_experts={number} and num_experts_per_tok={per_token}: expected groups of "
            "equally many experts, two at least, and in topk_group of them as many as a token "
            "has; correct it"
        )
    return groups, best
