# SPDX-License-Identifier: Apache-2.0
"""What the rows of docs/compatibility.md are checked with: each asks both engines, or both servers, the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tests.engine.compatibility.lab import SERVED, TOLERANCE, Ask, Lab
from tests.serving import Server

from vllm_tangram.errors import TangramError

TEXTS = ["The harbour of port seven has four cranes. " * 6, "x", "To be, or not to be", "0123456789" * 40]


def _logprobs(entries: Any) -> Any:
    """Log-probabilities by token; the order of equals is nobody's promise."""
    return [
        None if entry is None else {token: float(value.logprob) for token, value in entry.items()} for entry in entries
    ]


def generate(texts: list[str] = TEXTS, **params: Any) -> Ask:
    """All that a batch of requests answers, greedy and 24 tokens long unless ``params`` say otherwise."""

    def ask(llm: Any) -> Any:
        from vllm import SamplingParams

        extra = {name: params[name] for name in ("lora_request", "priority") if name in params}
        given = {name: value for name, value in params.items() if name not in extra}
        sampling = SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **given})
        return [
            {
                "prompt": _logprobs(output.prompt_logprobs or []),
                "answers": [
                    (
                        list(each.token_ids),
                        each.text,
                        each.finish_reason,
                        each.stop_reason,
                        _logprobs(each.logprobs or []),
                    )
                    for each in output.outputs
                ],
            }
            for output in llm.generate(texts, sampling, use_tqdm=False, **extra)
        ]

    return ask


def _answers(lab: Lab, **params: Any) -> list[Any]:
    return [answer for output in lab.same(generate(**params)) for answer in output["answers"]]


def greedy(lab: Lab) -> None:
    answers = _answers(lab)
    assert len({answer[1] for answer in answers}) == len(TEXTS)


def sampling(lab: Lab) -> None:
    lab.same(generate(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=7))
    lab.same(generate(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2))


def stops_and_biases(lab: Lab) -> None:
    text = _answers(lab)[0][1]
    stop = text[4:6]
    assert _answers(lab, stop=[stop])[0][2:4] == ("stop", stop)
    lab.same(generate(logit_bias={65: 50.0}, max_tokens=4))
    lab.same(generate(allowed_token_ids=[65, 66, 67], min_tokens=8))
    lab.same(generate(bad_words=[text[0]]))


def logprobs(lab: Lab) -> None:
    answers = _answers(lab, logprobs=5)
    assert all(5 <= len(step) <= 6 for answer in answers for step in answer[4])


def prompt_logprobs(lab: Lab) -> None:
    for output, text in zip(lab.same(generate(prompt_logprobs=3)), TEXTS, strict=True):
        assert len(output["prompt"]) == len(text.encode())


def several_answers(lab: Lab) -> None:
    answers = _answers(lab, n=3, temperature=1.0, seed=11)
    assert len(answers) == 3 * len(TEXTS)
    assert len({answer[1] for answer in answers}) == len(answers)


def beam_search(lab: Lab) -> None:
    def ask(llm: Any) -> Any:
        from vllm.sampling_params import BeamSearchParams

        outputs = llm.beam_search([{"prompt": text} for text in TEXTS], BeamSearchParams(beam_width=3, max_tokens=8))
        return [[(beam.tokens, float(beam.cum_logprob)) for beam in output.sequences] for output in outputs]

    assert all(len(beams) == 3 for beams in lab.same(ask, tolerance=10 * TOLERANCE))


def structured(lab: Lab) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["n", "b"],
        "additionalProperties": False,
    }

    def answers(**constraint: Any) -> list[str]:
        structure = StructuredOutputsParams(**constraint)
        return [answer[1] for answer in _answers(lab, structured_outputs=structure, ignore_eos=False, max_tokens=40)]

    assert all(re.fullmatch(r"[a-f]{3}-\d{2}", text) for text in answers(regex=r"[a-f]{3}-\d{2}"))
    assert set(answers(choice=["yes", "no"])) <= {"yes", "no"}
    assert all(set(text) <= set("ab") for text in answers(grammar='root ::= "a" root "b" | "ab"'))
    texts = answers(json=schema)
    assert all(text.lstrip().startswith("{") for text in texts)


def lora(lab: Lab) -> None:
    """Adapted and plain requests of one text do not mix, nor does what is cached of them."""
    from vllm.lora.request import LoRARequest

    adapter = make_adapter(lab.model, lab.folder)

    def ask(llm: Any) -> Any:
        plain, adapted = generate(), generate(lora_request=LoRARequest("tune", 1, str(adapter)))
        return [plain(llm), adapted(llm), plain(llm), adapted(llm)]

    one, other, *again = lab.same(ask, enable_lora=True, max_lora_rank=8)
    assert [one, other] == again
    assert one != other


def make_adapter(model: Path, folder: Path, rank: int = 4) -> Path:
    """A random LoRA adapter of the query and value projections, in PEFT's format."""
    config = json.loads((model / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    rng, tensors = np.random.default_rng(5), {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in (("q_proj", config["num_attention_heads"]), ("v_proj", config["num_key_value_heads"])):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = rng.normal(0, 0.5, (rank, hidden)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = rng.normal(0, 0.5, (heads * width, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**described, "bias": "none", "task_type": "CAUSAL_LM"}))
    return folder


def priority(lab: Lab) -> None:
    def ask(llm: Any) -> Any:
        return generate(TEXTS * 6, priority=[number % 5 for number in range(6 * len(TEXTS))])(llm)

    lab.same(ask, scheduling_policy="priority", max_num_seqs=3)


def chat_tools(lab: Lab) -> None:
    function = {
        "name": "cranes",
        "description": "Cranes of a port",
        "strict": True,  # else any JSON will do, and a random model gives any
        "parameters": {
            "type": "object",
            "properties": {"port": {"type": "string", "enum": ["seven", "fourteen"]}, "all": {"type": "boolean"}},
            "required": ["port", "all"],
            "additionalProperties": False,
        },
    }

    def ask(server: Server) -> Any:
        calls = []
        for choice in ("required", {"type": "function", "function": {"name": "cranes"}}):
            answer = server.chat(
                TEXTS[0], max_tokens=300, tools=[{"type": "function", "function": function}], tool_choice=choice
            )
            calls += [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls]
        return calls

    for name, arguments in lab.served(ask):
        assert name == "cranes"
        assert json.loads(arguments)["port"] in ("seven", "fourteen")


def streaming(lab: Lab) -> None:
    def ask(server: Server) -> Any:
        whole = server.chat(TEXTS[0], max_tokens=30).choices[0].message.content
        pieces = [chunk.choices[0].delta.content for chunk in server.chat(TEXTS[0], max_tokens=30, stream=True)]
        assert "".join(piece or "" for piece in pieces) == whole
        return whole

    assert lab.served(ask)


def completions(lab: Lab) -> None:
    def ask(server: Server) -> Any:
        answer = server.client.completions.create(
            model=SERVED, prompt=TEXTS[:2], max_tokens=6, temperature=0, logprobs=2, echo=True
        )
        return [(choice.text, choice.logprobs.tokens, choice.logprobs.token_logprobs) for choice in answer.choices]

    assert [text.startswith(given) for (text, *_), given in zip(lab.served(ask), TEXTS, strict=False)] == [True, True]


def beam_search_served(lab: Lab) -> None:
    def ask(server: Server) -> Any:
        answer = server.chat(TEXTS[2], max_tokens=6, n=3, extra_body={"use_beam_search": True})
        return [choice.message.content for choice in answer.choices]

    assert len(lab.served(ask)) == 3


def embeddings(lab: Lab) -> None:
    """No such route for a model that generates; stock has none either."""

    def ask(server: Server) -> Any:
        answer = server.http.post("/v1/embeddings", json={"model": SERVED, "input": "x"})
        return answer.status_code, answer.json()

    status, body = lab.served(ask)
    assert status == 404
    assert "Not Found" in json.dumps(body)


def streaming_input(lab: Lab) -> None:
    """What vLLM's asynchronous engine asks for when the prompt is a generator."""

    def ask(llm: Any) -> Any:
        from vllm import SamplingParams

        processor = llm.llm_engine.input_processor
        inputs = llm.llm_engine.renderer.render_cmpl([{"prompt": "x"}])[0]
        try:
            processor.process_inputs("r", inputs, SamplingParams(), supported_tasks=("generate",), resumable=True)
        except TangramError as error:
            return str(error)
        return "taken"

    lab.same(generate(["x"]))
    assert lab.shared.engines is not None
    stock, ours = (ask(engine.llm) for engine in lab.shared.engines)
    assert stock == "taken"
    assert "the whole prompt must be known at arrival" in ours


def with_options(tolerance: float = TOLERANCE, **options: Any) -> Callable[[Lab], None]:
    """Greedy answers and their log-probabilities with engine options."""
    return lambda lab: lab.same(generate(logprobs=2), tolerance=tolerance, **options)
