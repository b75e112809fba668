"""Stable on-policy distillation of large language models on Megatron-Core."""

from stable_opd_mcore.parallel import megatron_import

megatron_import.install()
