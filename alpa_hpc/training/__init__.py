"""Data, optimiser and the loop that trains by a plan."""
