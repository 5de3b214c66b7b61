"""Measured seconds of tasks, and the store that keeps them."""
