"""Run folders, and the processes and jobs that work on them."""
