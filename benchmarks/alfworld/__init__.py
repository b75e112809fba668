"""ALFWorld's engine with games of our own: OPD of agents that a CPU can train."""
