"""Names of dtypes in safetensors files."""

from __future__ import annotations

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Those that weights have."""

ALL = {
    **DTYPES,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Those that a buffer may have besides."""

NAMES = {dtype: name for name, dtype in ALL.items()}
