"""The demonstration: on-policy distillation collapses, Stable-OPD holds, on a laptop's CPU."""
