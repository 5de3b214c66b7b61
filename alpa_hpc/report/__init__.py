"""Figures of a run for people and files."""
