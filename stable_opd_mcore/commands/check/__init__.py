"""Checks before training: from a pair, a config, a directory and a topology to findings."""
