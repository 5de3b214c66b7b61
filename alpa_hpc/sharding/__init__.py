"""Layers on one logical mesh: their strategies, what these cost, the best of them, and what a device then computes."""
