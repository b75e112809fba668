"""Plain OPD, Stable-OPD and SFT on a pretrained language model that a CPU can train."""
