# SPDX-License-Identifier: Apache-2.0
"""Pin requirements by the hashes of the files that pip finds; CONTRIBUTING.md says when.

    python requirements/hash_lock.py requirements/cpu.lock

reads NAME==VERSION lines (hashes that are there are left out), asks pip which files it would install, and writes the
lines again, each with the SHA-256 of its file. Comments stay where they are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def canonical(name: str) -> str:
    """As the packaging standards compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(path: Path) -> None:
    lines = [line.split(" --hash=")[0] for line in path.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        pins, report = Path(folder, "pins"), Path(folder, "report")
        pins.write_text("\n".join(lines))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        subprocess.run([*pip, "--report", str(report), "-r", str(pins)], check=True)
        found = {
            canonical(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"]
            for item in json.loads(report.read_text())["install"]
        }
    hashed = [
        line if not line or line.startswith("#") else f"{line} --hash=sha256:{found[canonical(line.split('==')[0])]}"
        for line in lines
    ]
    path.write_text("\n".join(hashed) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
