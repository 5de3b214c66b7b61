"""The parallel plan as data, and as a file."""
