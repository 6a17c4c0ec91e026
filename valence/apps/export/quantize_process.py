"""Quantize a GGUF file with a compiled library of llama.cpp, in a separate process.

``python quantize_process.py LIBRARY SOURCE TARGET TYPE``; TYPE is llama.cpp's number of the type.
It imports nothing but the standard library, because a library that fails ends its process.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


class QuantizeParams(ctypes.Structure):
    """The first two fields of ``llama_model_quantize_params``, and room for the others.

    llama.cpp fills the whole structure with its defaults; only ``ftype`` is changed.
    """

    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("others", ctypes.c_byte * 1024),
    )


def main(library: str, source: str, target: str, file_type: str) -> int:
    folder = Path(library).parent
    for name in ("libggml-base*", "libggml.*", "libggml.so*"):
        for path in sorted(folder.glob(name)):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    llama = ctypes.CDLL(library)
    llama.llama_backend_init()
    llama.llama_model_quantize_default_params.restype = QuantizeParams
    llama.llama_model_quantize.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.POINTER(QuantizeParams),
    )
    llama.llama_model_quantize.restype = ctypes.c_uint32
    params = llama.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    return int(llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
