"""python -m benchmarks.gpu.wheels [--python-version X.Y]: the wheels that a bare GPU machine lacks.

``first_contact.sh`` installs them without a network from ``build/wheels``. Of bitsandbytes only the
library for CUDA 13.0 is kept (and that for CPUs). Prints the sizes; exit status 1 if they exceed
the limit.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

FOLDER = Path("build/wheels")
MAX_BYTES = 60 * 2**20
REQUIREMENTS = (
    "annotated-types==0.8.0",
    "bitsandbytes==0.50.2",
    "charset-normalizer==3.4.4",
    "datasets==4.8.5",
    "dill==0.4.1",
    "liger-kernel==0.8.5",
    "multiprocess==0.70.19",
    "narwhals==2.12.0",
    "peft==0.21.2",
    "plotly==7.1.0",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "requests==2.32.5",
    "ruamel.yaml==0.19.1",
    "trl==1.16.0",
    "typing-extensions==4.16.0",
    "typing-inspection==0.4.5",
    "urllib3==2.5.0",
)
"""Together with torch 2.11, transformers 5.17, triton 3.6 and the packages that these need."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
LIBRARIES = ("libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so")


def download(folder: Path, python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--only-binary", ":all:", "--python-version", python]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_x86_64"]
    subprocess.run([*command, *REQUIREMENTS], check=True)
    for wheel in folder.glob("bitsandbytes-*.whl"):
        remove_libraries(wheel)


def remove_libraries(wheel: Path) -> None:
    """Write a wheel again without the libraries that are not in LIBRARIES."""
    smaller = wheel.with_suffix(".tmp")
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        records, record = list[str](), ""
        for item in source.infolist():
            name = Path(item.filename).name
            if name.endswith(".so") and name not in LIBRARIES:
                continue
            if item.filename.endswith(".dist-info/RECORD"):
                record = item.filename
                continue
            content = source.read(item)
            out.writestr(item, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            records.append(f"{item.filename},sha256={digest.decode()},{len(content)}")
        out.writestr(record, "\n".join([*records, f"{record},,", ""]))
    smaller.replace(wheel)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wheels", description=__doc__)
    parser.add_argument("--python-version", default="3.12")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    download(options.folder, options.python_version)
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(options.folder.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 2**20:6.1f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:6.1f} MiB in {options.folder} (limit 60)")
    return 0 if sum(sizes.values()) <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
