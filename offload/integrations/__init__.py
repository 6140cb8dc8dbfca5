"""Bridges to other libraries. Each file knows only the public names of `offload`, and imports its library when used."""
