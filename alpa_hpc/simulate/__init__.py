"""Programs run in virtual time: what a plan would take, and where it would wait."""
