"""What survives a run: checkpoints, counters, rollouts, the run directory."""
