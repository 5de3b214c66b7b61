"""Runs of layers on submeshes: candidates, their costs, and the best partition (paper, section 5)."""
