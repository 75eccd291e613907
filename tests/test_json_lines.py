# SPDX-License-Identifier: Apache-2.0
"""Files with a JSON object a line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from vllm_tangram.errors import TangramError
from vllm_tangram.json_lines import read_json_lines


@pytest.mark.parametrize("packed", [False, True])
def test_only_a_newline_ends_a_line(packed: bool, tmp_path: Path) -> None:
    """Texts have other characters that Python, too, takes for the end of a line."""
    objects = [{"text": text} for text in ("a\u2028b", "c\u0085d\u2029", "e\vf\x1c")]
    data = "\r\n\n".join(json.dumps(each, ensure_ascii=False) for each in objects).encode()
    path = tmp_path / ("file.jsonl.gz" if packed else "file.jsonl")
    path.write_bytes(gzip.compress(data) if packed else data)
    assert list(read_json_lines(path, "--file")) == [
        (f"{path}, line {number}", each) for number, each in zip((1, 3, 5), objects, strict=True)
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [('{"a": ', "not valid JSON"), ("[" * 100_000, "not valid JSON"), ("[{}]", "expected a JSON object, got list")],
)
def test_a_wrong_line_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text('{"fine": 1}\n' + line)
    found = read_json_lines(path, "--file")
    assert next(found)[1] == {"fine": 1}
    with pytest.raises(TangramError, match=f"--file: .*file.jsonl, line 2: {problem}"):
        next(found)


@pytest.mark.parametrize("data", [None, b"no gzip", gzip.compress(b"\xff\xfe"), gzip.compress(b"{}" * 999)[:30]])
def test_what_cannot_be_read(data: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl.gz"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(TangramError, match=r"--file: .*file\.jsonl\.gz cannot be read: ."):
        list(read_json_lines(path, "--file"))
