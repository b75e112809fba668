"""The sizes of what mixes the tokens of a layer in other ways than usual attention, as config.json
has them: latent attention and gated delta nets."""

from __future__ import annotations

from dataclasses import dataclass

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.config_fields import Fields
from stable_opd_mcore.models.description.rotary_settings import Rotary, read_latent_rotary


@dataclass(frozen=True)
class Latent:
    """The sizes of a multi-head latent attention."""

    query_rank: int | None  # width of the latent of queries; None: they are made of the token
    rank: int  # width of the latent of keys and values
    plain_dim: int  # elements of a query or key that are not rotated
    rotated_dim: int  # elements that are, which all heads' keys share
    value_dim: int
    score_factor: float  # what YaRN multiplies scores by
    rotated_factor: float  # what it multiplies the share of the rotated elements by


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of a gated delta net. A key head serves equally many value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # size of one key head
    value_dim: int  # size of one value head
    conv_width: int  # tokens that the convolution reads

    @property
    def values_per_key(self) -> int:
        """Value heads of one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def keys(self) -> int:
        """Width of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of queries, keys and values, over which the convolution runs."""
        return 2 * self.keys + self.values


def read_latent(fields: Fields) -> tuple[Latent, Rotary]:
    """The sizes of a latent attention, and the rotary positions of its rotated elements."""
    size = fields.count("qk_rope_head_dim")
    if fields.get("head_dim", size) not in (None, size):
        raise UserError(
            f"{fields.origin}: head_dim={fields.get('head_dim')!r:.60} and qk_rope_head_dim={size} "
            "differ, which transformers reads as one; remove head_dim"
        )
    rotary, score_factor = read_latent_rotary(fields, size)
    has_none = "q_lora_rank" in fields.values and fields.get("q_lora_rank") is None
    latent = Latent(
        query_rank=None if has_none else fields.count("q_lora_rank"),
        rank=fields.count("kv_lora_rank"),
        plain_dim=fields.count("qk_nope_head_dim"),
        rotated_dim=size,
        value_dim=fields.count("v_head_dim"),
        score_factor=score_factor,
        rotated_factor=rotary.score_factor,
    )
    return latent, rotary


def read_delta_net(fields: Fields) -> DeltaNet:
    """The sizes of a gated delta net. Raises UserError if its heads do not suit."""
    net = DeltaNet(
        num_key_heads=fields.count("linear_num_key_heads"),
        num_value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        conv_width=fields.count("linear_conv_kernel_dim"),
    )
    if net.num_value_heads % net.num_key_heads:
        raise UserError(
            f"{fields.origin}: linear_num_value_heads={net.num_value_heads} is not a multiple of "
            f"linear_num_key_heads={net.num_key_heads}; correct it"
        )
    return net
