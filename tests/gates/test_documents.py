# SPDX-License-Identifier: Apache-2.0
"""Which tokens a document is, and its scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_tangram import TangramError
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.gates import documents
from vllm_tangram.gates.documents import document_ids, read_document, score_document
from vllm_tangram.gates.targets import kvzip_scores

TEXT = "The codes are 17 and 29.\nNever tell them to anybody"
QUESTIONS = ("Which codes?", "\n\n12 or 13", " what", "\u00e9\u4e2d")


@pytest.fixture(scope="module")
def tokenizer(embedded: Path) -> Any:
    return AutoTokenizer.from_pretrained(embedded)


def chat(tokenizer: Any, *messages: tuple[str, str]) -> list[int]:
    named = [{"role": role, "content": content} for role, content in messages]
    return list(tokenizer.apply_chat_template(named, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_prompt_with_the_document_begins_with_its_tokens(tokenizer: Any, question: str) -> None:
    system = document_ids(tokenizer, [{"role": "system", "content": TEXT}])
    user = document_ids(tokenizer, [{"role": "user", "content": TEXT}])
    text = document_ids(tokenizer, TEXT)
    prompts = [
        (system, chat(tokenizer, ("system", TEXT), ("user", question))),
        (system, chat(tokenizer, ("system", TEXT + question), ("user", question))),
        (user, chat(tokenizer, ("user", TEXT + question))),
        (user, chat(tokenizer, ("user", TEXT), ("assistant", question), ("user", question))),
        (text, tokenizer.encode(TEXT + question)),
    ]
    for ids, prompt in prompts:
        assert ids == prompt[: len(ids)]
        assert TEXT[:-10] in tokenizer.decode(ids)


def test_messages_before_the_last_are_part_of_it(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    ids = document_ids(tokenizer, messages)
    prompt = chat(tokenizer, ("system", "Be brief."), ("user", TEXT), ("assistant", "Yes"), ("user", "Why"))
    assert ids == prompt[: len(ids)]
    assert "Be brief." in tokenizer.decode(ids)


def test_templates_that_do_not_take_it(dense: DenseModel) -> None:
    refuses = PreTrainedTokenizerFast(
        tokenizer_object=dense.tokenizer.backend_tokenizer,
        chat_template="{{ raise_exception('roles must alternate') }}",
    )
    with pytest.raises(TangramError, match="chat template does not take such messages: roles must alternate"):
        document_ids(refuses, [{"role": "system", "content": "a"}])
    refuses.chat_template = None
    with pytest.raises(TangramError, match=r"no chat template: .*--as prompt"):
        document_ids(refuses, [{"role": "system", "content": "a"}])
    assert document_ids(refuses, "abc") == [97 - 33, 98 - 33, 99 - 33]  # the tests' alphabet begins with "!"


def test_a_date_before_the_document(dense: DenseModel) -> None:
    """Scores of today would be found by no prompt of tomorrow, and nobody would tell."""
    dated = PreTrainedTokenizerFast(tokenizer_object=dense.tokenizer.backend_tokenizer)
    text = "{{ messages[0]['content'] }}"
    dated.chat_template = text + "{{ strftime_now('%d %b %Y') }}"
    assert document_ids(dated, [{"role": "system", "content": "abc"}]) == [97 - 33, 98 - 33, 99 - 33]
    dated.chat_template = "{{ strftime_now('%d %b %Y') }}" + text
    with pytest.raises(TangramError, match="writes the day's date before the document"):
        document_ids(dated, [{"role": "system", "content": "abc"}])


def test_reading_documents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(TEXT)
    assert read_document(path, "prompt") == TEXT
    assert read_document(path, "system") == [{"role": "system", "content": TEXT}]
    assert read_document(path, "user") == [{"role": "user", "content": TEXT}]
    with pytest.raises(TangramError, match=r"is not valid JSON .*--as messages"):
        read_document(path, "messages")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for written in (messages, {"messages": messages, "model": "x"}):
        path.write_text(json.dumps(written))
        assert read_document(path, "messages") == messages
    for wrong in ([], {}, 1, [1], [{"role": "user"}], [{"role": "user", "content": ["a"]}]):
        path.write_text(json.dumps(wrong))
        with pytest.raises(TangramError, match="expected a JSON list of messages"):
            read_document(path, "messages")
    path.write_bytes(b"\xff")
    with pytest.raises(TangramError, match="cannot read the document"):
        read_document(path, "prompt")
    path.write_text(" \n")
    with pytest.raises(TangramError, match="is empty"):
        read_document(path, "prompt")


def test_scores_are_those_of_kvzip(dense: DenseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(256, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    scored = score_document(dense, ids, {"document": "x"})
    assert torch.equal(scored.scores, kvzip_scores(dense, ids).half())
    assert scored.ids.tolist() == ids
    assert scored.model == dense.fingerprint
    assert scored.info["document"] == "x"
    with pytest.raises(TangramError, match="no token that would be the same"):
        score_document(dense, [], {})
    instruction = len(documents.repeat_ids(dense.tokenizer, [], first=False)) + 8  # 8 tokens name the chunk
    monkeypatch.setattr(dense, "max_tokens", 90 + instruction + 90)
    score_document(dense, ids, {})
    monkeypatch.setattr(dense, "max_tokens", 90 + instruction + 90 - 1)
    with pytest.raises(TangramError, match=f"has 90 tokens; .* {180 + instruction}, and .* context has"):
        score_document(dense, ids, {})
