"""`offload finetune | tune | doctor | report`: the command line."""

from offload.cli.parser import main

__all__ = ["main"]
