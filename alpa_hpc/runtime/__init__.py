"""Stages as programs, and what runs them: one mesh a group of ranks, or all meshes in one process."""
