"""What `import offload` adds to `import torch`, and what `offload --help` takes: `python -m benchmarks.imports`.

Each is a process of its own, in turns. What torch takes is the peer: the bar of the first two rows says that they add
less than 0.3 s to it, and is written as the ratio of torch's time to the time of both that this makes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable

from benchmarks._common import Row, interleaved, run

TITLE = "starting up"
LIMIT_S = 0.3  # what `import offload` may add to torch's own import

_TORCH = "import torch, safetensors, numpy"  # what everybody has loaded who has a model
_USED = "import offload\nfor name in offload.__all__: getattr(offload, name)"
PROGRAMS = {
    "torch": _TORCH,
    "import offload": f"{_TORCH}\nimport offload",
    "import offload, all names used": f"{_TORCH}\n{_USED}",
    "offload --help": "from offload.cli import main\nmain(['--help'])",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Seconds that each takes beside torch's own import; `offload --help` in all."""
    found = interleaved({name: _seconds(code) for name, code in PROGRAMS.items()}, arguments.rounds)
    torch_s = statistics.median(found.pop("torch"))
    rows = []
    for name, seconds in found.items():
        value, spread = statistics.median(seconds), (max(seconds) - min(seconds)) / statistics.median(seconds)
        if name == "offload --help":
            rows.append(Row(name, value, "s", "import torch", torch_s, torch_s / value, spread, None, None))
            continue
        added, bar = max(value - torch_s, 1e-4), torch_s / (torch_s + LIMIT_S)
        ratio = torch_s / (torch_s + added)
        rows.append(Row(f"{name}: added", added, "s", "import torch", torch_s, ratio, spread, bar, ratio >= bar))
    return rows


def _seconds(code: str) -> Callable[[], float]:
    timed = "import sys, time\nstart = time.perf_counter()\n{}\nprint(time.perf_counter() - start, file=sys.stderr)"
    body = f"try:\n    exec({code!r})\nexcept SystemExit:\n    pass"

    def take() -> float:
        done = subprocess.run(
            [sys.executable, "-c", timed.format(body)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True
        )
        return float(done.stderr.split()[-1])

    return take


if __name__ == "__main__":
    sys.exit(run([sys.modules["__main__"]]))
