"""What a machine has, and what a run will need of it."""
