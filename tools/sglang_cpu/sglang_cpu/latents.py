"""Latent attention in plain torch: SGLang's registry of models imports this module.

Without it SGLang makes keys and values of a prompt's own tokens, and "torch_native" reads what the
cache has, which is latents. So prompts take the way that decoding takes.
"""

from typing import Any

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)


def _absorbed(*_: Any) -> AttnForwardMethod:
    return AttnForwardMethod.MLA


for name in ("torch_native", "intel_amx"):
    AttentionBackendRegistry.register(name, _absorbed)
