"""What SGLang's model registry finds here: its own classes of the trainer's families."""

from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteForCausalLM
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

EntryClass = [
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    LlamaForCausalLM,
    GptOssForCausalLM,
    Gemma3ForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
]
