"""A frozen draft on a CPU, for tests: EAGLE-3's model, and plain attention in place of AMX's.

SGLang's model registry imports this module. A server needs --speculative-draft-attention-backend
intel_amx, one step and a chain. On a CPU SGLang accepts a draft's token if it is the student's
likeliest one, whatever the temperature, so such a server is no sampler; its log-probabilities are
the student's.
"""

from sglang.srt.layers.attention import intel_amx_backend
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

from sglang_cpu.sinks import PlainAttention

intel_amx_backend.IntelAMXAttnBackend = PlainAttention
EntryClass = [LlamaForCausalLMEagle3]
