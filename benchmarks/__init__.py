"""Measurements of what the project promises, each beside a peer or a limit measured in the same run."""
