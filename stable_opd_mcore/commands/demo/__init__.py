"""The demonstration on a CPU: on-policy distillation collapses and Stable-OPD does not."""
