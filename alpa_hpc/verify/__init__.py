"""Compiled programs held against the plan: their collectives kind by kind and byte by byte, their peak memory."""
