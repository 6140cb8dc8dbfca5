"""Machines that lack something: the run is the same to the bit, and what was chosen instead is told."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import native
from tests.loops import ROOT, TIERS, adamw, close, masters, plain_adamw, run_python, train, wrap
from tests.models import MLP_TASK
from tests.unit.storage.iotools import build_shim

pytestmark = pytest.mark.host


def fingerprint(swap: Path) -> dict[str, Any]:
    """Losses and a digest of all bits of a short run, and what it ran with."""
    torch.set_num_threads(1)
    model = wrap(MLP_TASK.model(), TIERS["nvme"], swap, gpu="4KiB", dtype="bf16")
    optimizer = adamw(model)
    losses = train(model, optimizer, MLP_TASK.batches(5, dtype=torch.bfloat16), clip=0.5)
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    bits = hashlib.sha256(b"".join(t.numpy().tobytes() for t in (*masters(model).values(), *moments)))
    offload.unwrap(model)
    return {"losses": losses, "bits": bits.hexdigest(), "info": offload.build_info(), "file": offload.__file__}


def elsewhere(swap: Path, package: Path = ROOT, before: str = "", **environment: str) -> dict[str, Any]:
    """The same in a process of its own, with the package from another place."""
    code = f"""
{before}
import sys
sys.path[:] = [{str(package)!r}, {str(ROOT)!r}, *filter(None, sys.path)]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]  # they come before the path
import json
from pathlib import Path
from tests.behaviour.test_environment import fingerprint
print(json.dumps(fingerprint(Path({str(swap)!r}))))
"""
    done = run_python(code, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Exception ignored" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["file"].startswith(str(package))
    return result


def assert_same_run(got: dict[str, Any]) -> None:
    want = _reference()
    assert got["losses"] == want["losses"]
    assert got["bits"] == want["bits"]


@functools.cache
def _reference() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return fingerprint(Path(folder))


def test_without_the_native_core(tmp_path: Path) -> None:
    """Torch computes and aiofiles writes; the bits are the same, and somebody who looks is told why."""
    package = tmp_path / "package"
    shutil.copytree(ROOT / "offload", package / "offload", ignore=shutil.ignore_patterns("_lib", "__pycache__"))
    result = elsewhere(tmp_path, package)
    assert_same_run(result)
    info = result["info"]
    assert info["native"] is False
    assert "compiler" in info["reason"]
    assert info["isas"] == ["torch"]
    assert info["io"] == "aiofiles"
    assert info["io_reason"]


def test_without_compilers_tools_and_home(tmp_path: Path) -> None:
    """Nothing is built at run time, so nothing of this is needed."""
    nowhere = str(tmp_path / "nowhere")
    names = ("CUDA_HOME", "CC", "CXX", "HOME", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
    result = elsewhere(tmp_path, PATH=nowhere, **dict.fromkeys(names, nowhere))
    assert_same_run(result)
    assert not Path(nowhere).exists()


NO_DIRECT_IO = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#define REFUSE_OPEN(name) int name(const char *path, int flags, ...) { \
  va_list a; va_start(a, flags); int mode = va_arg(a, int); va_end(a); \
  if (flags & O_DIRECT) { errno = EINVAL; return -1; } \
  return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode); }
#define REFUSE_OPENAT(name) int name(int at, const char *path, int flags, ...) { \
  va_list a; va_start(a, flags); int mode = va_arg(a, int); va_end(a); \
  if (flags & O_DIRECT) { errno = EINVAL; return -1; } \
  return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name))(at, path, flags, mode); }
#define REFUSE_FCNTL(name) int name(int fd, int command, ...) { \
  va_list a; va_start(a, command); void *argument = va_arg(a, void *); va_end(a); \
  if (command == F_SETFL && ((long)argument & O_DIRECT)) { errno = EINVAL; return -1; } \
  return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, #name))(fd, command, argument); }
REFUSE_OPEN(open) REFUSE_OPEN(open64)
REFUSE_OPENAT(openat) REFUSE_OPENAT(openat64)
REFUSE_FCNTL(fcntl) REFUSE_FCNTL(fcntl64)
"""


def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    result = elsewhere(swap, LD_PRELOAD=build_shim(NO_DIRECT_IO, tmp_path))
    assert_same_run(result)
    assert not list(swap.iterdir())


# What a container's seccomp profile does: io_uring_setup (425 everywhere) is not permitted from here on.
FORBID_URING = """
import ctypes, struct
program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in [
    (0x20, 0, 0, 0),  # load the number of the call
    (0x15, 0, 1, 425),
    (0x06, 0, 0, 0x00050000 | 1),  # fail with EPERM
    (0x06, 0, 0, 0x7FFF0000),  # allow
]))
pointer = ctypes.create_string_buffer(struct.pack("@HP", 4, ctypes.addressof(program)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, pointer) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, a filter
"""


@pytest.mark.skipif(sys.platform != "linux" or not native.available(), reason="no Linux, or no native core")
def test_io_uring_forbidden_by_seccomp(tmp_path: Path) -> None:
    result = elsewhere(tmp_path, before=FORBID_URING)
    assert_same_run(result)
    assert result["info"]["io"] == "threads"
    assert "io_uring_setup: Operation not permitted" in result["info"]["io_reason"]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_swap_in_memory() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert_same_run(fingerprint(Path(folder) / "deep" / "down"))
        assert not list((Path(folder) / "deep" / "down").iterdir())


def test_one_cpu(tmp_path: Path) -> None:
    if not hasattr(os, "sched_setaffinity") or sys.platform != "linux":
        pytest.skip("no affinity here")
    mine = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mine)})
        result = elsewhere(tmp_path)
    finally:
        os.sched_setaffinity(0, mine)
    assert_same_run(result)
    info = result["info"]
    assert info["threads"] == 1


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("tiers", [("gpu",), *TIERS.values()], ids=["gpu", *TIERS])
def test_a_default_device_of_torch_is_not_ours(tiers: tuple[str, ...], device: str, tmp_path: Path) -> None:
    """Host memory is host memory. Device "meta" stands in for any other that the user may have made the default."""
    plain, model = MLP_TASK.model(), MLP_TASK.model()
    batches = MLP_TASK.batches(4)
    want = train(plain, plain_adamw(plain), batches, clip=0.5)
    with torch.device("meta"):
        wrap(model, tiers, tmp_path, gpu="4KiB" if len(tiers) > 1 else None, device=device)
        optimizer = adamw(model)
        got = train(model, optimizer, batches, clip=0.5)
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(masters(model))
        offload.clip_grad_norm_(model.parameters(), 1.0)
        with offload.gather(model.b.weight, modify=True), torch.no_grad():
            model.b.weight[0] = 1.0
        offload.save_pretrained(model, tmp_path / "export")
        offload.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
        offload.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
        offload.unwrap(model)
    close(got, want)
    assert model.b.weight.device.type == "cpu"
    assert (model.b.weight[0] == 1).all()
