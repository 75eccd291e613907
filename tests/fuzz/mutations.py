# SPDX-License-Identifier: Apache-2.0
"""Damage to safetensors files and their JSON, from a flipped bit to a header made by somebody who knows the format."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

#: Anything that JSON can say; Python's reads NaN, infinities and numbers of any size, too.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["NaN", "1e999", "../../etc/passwd", "F32", "BF16", "\x00", "9" * 400])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)

_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes flipped, cut off, taken out, put in or repeated; mostly near the beginning, where the header is."""
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        start = draw(st.one_of(st.integers(0, min(len(data) - 1, 400)), st.integers(0, len(data) - 1)))
        stop = min(len(data), start + draw(st.integers(1, 64)))
        piece = draw(
            st.one_of(
                st.just(b""),
                st.binary(min_size=1, max_size=64),
                st.just(data[start:stop] * 2),
                st.binary(min_size=stop - start, max_size=stop - start),
            )
        )
        data = data[:start] + piece + (data[stop:] if draw(st.integers(0, 5)) else b"")
    return data


@st.composite
def damaged_header(draw: st.DrawFn, data: bytes, key: str) -> bytes:
    """The same tensors behind valid JSON of which a value, of safetensors' or of ours, is another."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    ours = json.loads(header["__metadata__"][key])
    place = draw(st.sampled_from(["ours", "ours", "safetensors", "text"]))
    if place == "ours":
        _replace(draw, ours)
        header["__metadata__"][key] = json.dumps(ours)
    elif place == "text":
        header["__metadata__"][key] = draw(
            st.one_of(
                st.text(max_size=30),
                VALUES.map(json.dumps),
                st.sampled_from(["[" * 100_000, '{"format_version": ' + "[" * 50_000, "1" * 5000, "{" * 3]),
            )
        )
    else:
        _replace(draw, header)
    changed = json.dumps(header, separators=(",", ":")).encode()
    return len(changed).to_bytes(_LENGTH_BYTES, "little") + changed + data[_LENGTH_BYTES + length :]


def _replace(draw: st.DrawFn, tree: Any) -> None:
    """Exchange, take out or add one value somewhere in a tree of lists and dictionaries."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        if isinstance(tree[key], dict | list) and tree[key] and draw(st.booleans()):
            tree = tree[key]
            continue
        action = draw(st.sampled_from(["exchange", "exchange", "remove"]))
        if action == "exchange":
            tree[key] = draw(VALUES)
        else:
            del tree[key]
        return
    if isinstance(tree, dict):
        tree[draw(st.text(max_size=8))] = draw(VALUES)
    else:
        tree.append(draw(VALUES))
