"""On-policy distillation of small agents on a CPU: they play our games in ALFWorld's engine."""
