"""Plain OPD and Stable-OPD on a real pretrained language model that a CPU can train."""
