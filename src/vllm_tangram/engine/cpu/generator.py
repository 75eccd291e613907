# SPDX-License-Identifier: Apache-2.0
"""Random generators of seeded requests on the CPU."""

from __future__ import annotations

import torch


class RewindableGenerator(torch.Generator):
    """Takes back the draw of a step whose token is discarded, and repeats the one for a token that was dropped later.

    vLLM's runner samples for every request of a step, also for one that is only part of the way through its prompt,
    and then takes the draw back by the generator's offset. A CPU generator has none, and the runner's process would
    end. Here the state before the step stands in for the offset, so a seeded request draws the same numbers in chunks
    as whole. A token that the scheduler drops is drawn again, too; there is one at most, for vLLM schedules no step of
    a request on the CPU before it has the token of the last one.
    """

    _place: int | None = None
    _before: torch.Tensor | None = None

    @classmethod
    def like(cls, generator: torch.Generator) -> RewindableGenerator:
        """A generator in the state of another."""
        rewindable = cls(device="cpu")
        rewindable.set_state(generator.get_state())
        return rewindable

    def begin_step(self, place: int) -> None:
        """Remember the state that a discarded draw goes back to; go back to it if a token is drawn again.

        Args:
            place: how many tokens the request has generated before the one to be drawn.

        """
        if place == self._place:
            self.set_offset(0)
        else:
            self._place, self._before = place, self.get_state()

    def get_offset(self) -> int:
        """For vLLM's runner; the number means nothing."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Go back to the state before the step, whatever the offset."""
        assert self._before is not None, "no step was begun"
        self.set_state(self._before)
        return self
