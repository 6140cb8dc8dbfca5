"""A run's figures as one page to look at, drawn from its `run.json`."""
