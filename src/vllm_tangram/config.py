# SPDX-License-Identifier: Apache-2.0
"""Every knob of the plugin, validated in one place."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_tangram.errors import TangramError

Grouping = Literal["global", "layer", "neighbours"]
Margin = Literal["inside", "on_top"]
Budgets = Literal["profile", "uniform"]

DEFAULT_BLOCK_SIZE = 32  # the smallest that the CPU's kernels take: eviction goes by blocks
MIXED_GRAPHS = range(512, 2049, 256)  # tokens of steps with prompts of which CUDA graphs are captured


class TangramConfig(BaseModel):
    """Options of one engine; travels to every process in vLLM's ``additional_config["tangram"]``.

    Attributes:
        retention: fraction of full KV that a long prompt may hold, in (0, 1].
        retention_floor: smallest retention that a single request may ask for, in (0, 1]; the server's own is always
            allowed.
        scorer: name of the importance scorer (``vllm_tangram.compression.scorers``). Where a user names none, the
            engine takes "fastkvzip" for models that have a gate; the default is the one that keeps most answers
            without (docs/quality.md).
        gate: path of the gate, for scorers that need one; None: one trained here before, or shipped.
        document_scores: files of ``tangram score``; a prompt that begins with such a document is selected by its scores
            there, and by the scorer elsewhere.
        profile: path of the retention profile; None only with ``budgets="uniform"`` or ``retention=1``.
        budgets: "profile" gives every head what the profile says, "uniform" gives all the same (for comparison).
        page_group_size: members (KV heads of any layer) per page, G.
        grouping: "global" sorts budgets over all layers, "layer" within each layer, "neighbours" not at all.
        alpha: standard deviations added to a member's mean (paper, section 4.1.1).
        margin: "inside" fits margin and grouping within ``retention``; "on_top" adds them, as the paper does.
        chunk_size: prompt tokens compressed at once; a multiple of vLLM's block size.
        sinks: first tokens of a prompt that are always kept.
        window: last tokens of every chunk that are always kept.
        session_spill_gib: host memory, in GiB, for compressed prefixes that lose their pages, of all ranks together;
            0 = none.
        session_ttl: seconds after which a compressed prefix that no request used is not found any more; 0 = never.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    retention: float = Field(0.25, gt=0, le=1)
    retention_floor: float = Field(0.05, gt=0, le=1)
    scorer: str = "keydiff"
    gate: str | None = None
    document_scores: tuple[str, ...] = ()
    profile: str | None = None
    budgets: Budgets = "profile"
    page_group_size: int = Field(4, ge=1)
    grouping: Grouping = "global"
    alpha: float = Field(2.0, ge=0, le=10)
    margin: Margin = "inside"
    chunk_size: int = Field(1024, ge=32)
    sinks: int = Field(4, ge=0)
    window: int = Field(16, ge=1)
    session_spill_gib: float = Field(0.0, ge=0, allow_inf_nan=False)
    session_ttl: float = Field(0.0, ge=0, allow_inf_nan=False)

    @field_validator("scorer")
    @classmethod
    def _known_scorer(cls, value: str) -> str:
        from vllm_tangram.compression import scorer_names

        if value not in scorer_names():
            raise ValueError(f"unknown scorer {value!r}; known: {', '.join(scorer_names())}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> TangramConfig:
        from vllm_tangram.compression import needs_gate

        if self.gate is not None and not needs_gate(self.scorer):
            raise ValueError(f"gate ({self.gate}) is for scorers that are made with one, and {self.scorer} is not")
        if self.sinks + self.window > self.chunk_size:
            raise ValueError(
                f"sinks + window ({self.sinks} + {self.window}) must fit in chunk_size ({self.chunk_size})"
            )
        return self

    @classmethod
    def parse(cls, options: dict[str, Any]) -> TangramConfig:
        """Validate options given by a user.

        Raises:
            TangramError: names every option that is wrong, as it is spelled on the command line.

        """
        if options.get("gate") is not None:
            options = {"scorer": "fastkvzip", **options}  # what a gate is for
        try:
            return cls(**options)
        except ValidationError as error:
            lines = []
            for problem in error.errors():
                option = "--" + str(problem["loc"][0]).replace("_", "-") if problem["loc"] else "options"
                reason = problem["msg"].removeprefix("Value error, ")
                given = f" (given: {problem['input']!r})" if problem["loc"] else ""
                lines.append(f"{option}: {reason}{given}")
            raise TangramError("; ".join(lines)) from None

    def request_retention(self, value: object) -> float:
        """Validate the retention that one request asks for (``vllm_xargs`` / ``extra_args``).

        Raises:
            TangramError: not a number, or outside [min(retention_floor, retention), 1].

        """
        floor = min(self.retention_floor, self.retention)  # what the server itself does may always be asked for
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TangramError(f"retention must be a number in [{floor:g}, 1], got {value!r}")
        if not floor <= value <= 1:
            raise TangramError(
                f"retention must be in [{floor:g}, 1] on this server, got {value!r}; "
                "the lower bound is --retention-floor, or --retention where that is smaller"
            )
        return float(value)


#: Default of every option, by name.
DEFAULTS: dict[str, Any] = {name: field.default for name, field in TangramConfig.model_fields.items()}
