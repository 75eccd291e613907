# SPDX-License-Identifier: Apache-2.0
"""Pilot texts and samples from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tangram.errors import TangramError
from vllm_tangram.pilot import MIN_CHARACTERS, Sample, load_samples, mixture, pilot_samples, pilot_texts


def test_texts_are_long_different_and_reproducible() -> None:
    texts = pilot_texts(25)
    assert min(map(len, texts)) >= MIN_CHARACTERS
    assert len({text[:500] for text in texts}) == 25
    assert pilot_texts(7) == texts[:7]
    assert not set(pilot_texts(5, seed=1)) & set(texts)


def test_texts_are_of_five_kinds() -> None:
    _prose, code, records, dialogue, instructed = pilot_texts(5)
    assert "def " in code
    assert records.count("Question: ") >= 8
    assert dialogue.count("User: ") > 5
    assert "## Document 2" in instructed[:MIN_CHARACTERS]


def test_samples_know_their_domain() -> None:
    samples = pilot_samples(7)
    assert [sample.domain for sample in samples] == [
        *("prose", "code", "records", "dialogue", "instructed"),
        *("prose", "code"),
    ]
    assert [sample.text for sample in samples] == pilot_texts(7)


def test_longer_texts_begin_with_the_shorter_ones() -> None:
    for short, long in zip(pilot_samples(5), pilot_samples(5, tokens=3 * 2048), strict=True):
        assert len(long.text) >= 3 * MIN_CHARACTERS
        assert long.text.startswith(short.text)


def test_a_mixture_takes_of_all_domains_alike() -> None:
    samples = [Sample(f"{domain}{i}", domain) for domain, count in (("a", 5), ("b", 1), ("c", 3)) for i in range(count)]
    taken = [sample.text for sample in mixture(samples, 7)]
    assert taken == ["a0", "b0", "c0", "a1", "c1", "a2", "c2"]
    assert [sample.text for sample in mixture(samples[:5], 3)] == ["a0", "a1", "a2"]
    assert sorted(mixture(samples, 100)) == sorted(samples)


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "samples.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_all_three_forms_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"text": "one", "id": 3}\r\n\n{"prompt": "tw\u00f6\u2028"}\n'
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}',
    )
    texts = ["one", "tw\u00f6\u2028", "user: hi\n\nassistant: ho"]
    assert load_samples(path) == [Sample(text, "samples") for text in texts]


def test_a_line_may_name_its_domain(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "one", "domain": "mail"}\n{"text": "two"}\n')
    assert load_samples(path) == [Sample("one", "mail"), Sample("two", "samples")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "a"', "not valid JSON"),
        ('["a"]', "expected a JSON object, got list"),
        ('{"txt": "a"}', r"expected one of the fields .*txt"),
        ('{"text": ""}', '"text" must be a string'),
        ('{"prompt": 3}', '"prompt" must be a string'),
        ('{"text": "a", "domain": 3}', '"domain" must be a string'),
        ('{"messages": []}', '"messages" must be a list'),
        ('{"messages": ["a"]}', '"messages" must be a list'),
        ('{"messages": [{"role": "user"}]}', '"content" must be a string'),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path, '{"text": "fine"}\n' + line + "\n")
    with pytest.raises(TangramError, match=f"samples.jsonl, line 2: {problem}"):
        load_samples(path)


@pytest.mark.parametrize(("content", "problem"), [("\n \n", "has no samples"), (b"\xff\xfe", "cannot be read")])
def test_a_useless_file_is_named(tmp_path: Path, content: str | bytes, problem: str) -> None:
    with pytest.raises(TangramError, match=problem):
        load_samples(write(tmp_path, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TangramError, match=r"absent\.jsonl"):
        load_samples(tmp_path / "absent.jsonl")
