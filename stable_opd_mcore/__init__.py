"""Stable on-policy distillation of large language models on Megatron-Core."""
