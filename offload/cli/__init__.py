"""`offload finetune | tune | doctor`: the command line."""

from offload.cli.parser import main

__all__ = ["main"]
