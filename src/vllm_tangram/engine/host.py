# SPDX-License-Identifier: Apache-2.0
"""Host memory behind the page pool, as workers see it: the buffer, and the copies of a step."""

from __future__ import annotations

import copy
import mmap
import weakref
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import distributed
from vllm.distributed.parallel_state import get_pp_group, get_world_group
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit, get_cgroup_memory_usage
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_tangram.engine.setup import host_pages, layout_of
from vllm_tangram.engine.spill import COPIES, COPIES_FAILED, Copies
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig

logger = init_logger("vllm.tangram")


def check_host_memory(vllm_config: VllmConfig, num_ranks: int = 1) -> None:
    """Refuse buffers for sessions that the machine has no memory for.

    Args:
        vllm_config: of the engine.
        num_ranks: ranks whose buffers are still to be allocated on this machine; each has an equal part of the memory.

    Raises:
        TangramError: names the option, what was asked for, and what there is.

    """
    pages, layout = host_pages(vllm_config), layout_of(vllm_config)
    asked, available = num_ranks * pages * layout.page_bytes, _available_bytes()
    if asked > available:
        raise TangramError(
            f"--session-spill-gib: {asked / 2**30:.2f} GiB of this machine's memory were asked for, but only "
            f"{available / 2**30:.2f} GiB are available: give less, or 0"
        )


def _available_bytes() -> int:
    """Memory that can be allocated without anybody being killed; in a container what that may still take."""
    available = psutil.virtual_memory().available
    limit, used = get_cgroup_memory_limit(), get_cgroup_memory_usage()
    return available if limit is None else min(available, max(limit - (used or 0), 0))


class HostBuffer:
    """Pages beside the pool, in host memory.

    Copies run on the current stream and neither allocate nor wait, so on CUDA a step's copies come after the forward of
    the step before and before its own.

    Args:
        pool: ``[P, page_bytes]`` uint8, the page pool.
        num_pages: of the buffer.

    Raises:
        TangramError: the memory cannot be had.

    """

    def __init__(self, pool: Tensor, num_pages: int) -> None:
        self.pool = pool
        try:
            # A mapping of its own: the driver registers whole pages of memory, and none twice.
            memory = mmap.mmap(-1, num_pages * pool.shape[1])
            self.pages = torch.frombuffer(memory, dtype=torch.uint8).view(num_pages, pool.shape[1])
            if pool.is_cuda:
                from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

                pin_tensor(self.pages)  # torch's own pinned memory is rounded up to a power of two
                weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self.pages.data_ptr())
        except (OSError, RuntimeError) as error:
            raise TangramError(
                f"--session-spill-gib: {num_pages * pool.shape[1] / 2**30:.2f} GiB of host memory cannot be allocated "
                f"({error}), {_available_bytes() / 2**30:.2f} GiB are available: give less, or 0"
            ) from error

    def run(self, copies: Copies) -> None:
        """Copy what a step has to copy, in its order."""
        for to_host, pairs in copies.runs:
            target, source = (self.pages, self.pool) if to_host else (self.pool, self.pages)
            if self.pool.is_cuda:
                _copy_on_stream(target, source, pairs)
            else:
                for to, of in pairs.items():
                    target[to] = source[of]


def _copy_on_stream(target: Tensor, source: Tensor, pairs: dict[int, int]) -> None:
    """All pages in one call of the driver; in the stream's order."""
    from vllm._custom_ops import swap_blocks_batch

    page_bytes = target.shape[1]
    to, of = torch.tensor([list(pairs.keys()), list(pairs.values())], dtype=torch.int64)
    sizes = torch.full_like(to, page_bytes)
    swap_blocks_batch(source.data_ptr() + page_bytes * of, target.data_ptr() + page_bytes * to, sizes)


class SpillingWorker:
    """Allocates the buffer for its runner; a mix-in of our workers."""

    model_runner: Any
    vllm_config: VllmConfig

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the pool, then the buffer."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        if num_pages := host_pages(self.vllm_config):
            check_host_memory(self.vllm_config)
            page_bytes = layout_of(self.vllm_config).page_bytes
            storage = self.model_runner.kv_caches[0].untyped_storage()
            pool = torch.empty(0, dtype=torch.uint8, device=self.model_runner.device).set_(storage)
            pool = pool[: kv_cache_config.num_blocks * page_bytes].view(-1, page_bytes)
            self.model_runner.host = HostBuffer(pool, num_pages)


class CopyVote:
    """Whether copies of a step failed on any rank.

    Ranks vote before the step's forward and nobody waits there: ranks of a pipeline's stages are in different steps. A
    step has results only when every rank has begun it, so whoever hands them out finds the votes there.

    Args:
        failed: on this rank.

    """

    def __init__(self, failed: bool) -> None:
        self._failed = torch.tensor([int(failed)], device="cpu")
        self._count = distributed.all_reduce(
            self._failed, distributed.ReduceOp.MAX, group=get_world_group().cpu_group, async_op=True
        )

    def mark(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """The step's output; if copies failed, the scheduler sees it there."""
        self._count.wait()
        if self._failed:
            output = copy.copy(output)  # an empty one is shared by all steps
            setattr(output, COPIES_FAILED, True)
        return output


class _MarkedLater(AsyncModelRunnerOutput):
    def __init__(self, output: AsyncModelRunnerOutput, vote: CopyVote) -> None:
        self._output, self._vote = output, vote

    def get_output(self) -> ModelRunnerOutput:
        return self._vote.mark(self._output.get_output())


class SpillingRunner:
    """Runs a step's copies before its forward; a mix-in of our runners.

    If they fail the step runs all the same, so that ranks stay together, and its output says that it does not count:
    pages that were not filled hold other KV.

    Not of workers: vLLM's older Ray executor calls the runner and passes the worker's methods by.
    """

    host: HostBuffer | None = None
    _vote: CopyVote | None = None

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """A step, after its copies."""
        copies = getattr(scheduler_output, COPIES, None)
        self._vote = CopyVote(self._fails(copies)) if copies else None
        return self._marked(super().execute_model(scheduler_output, *args, **kwargs))  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the step, where ``execute_model`` gave none."""
        return self._marked(super().sample_tokens(*args, **kwargs))  # type: ignore[misc]

    def _fails(self, copies: Copies) -> bool:
        assert self.host is not None
        try:
            self.host.run(copies)
        except Exception as error:  # whatever it is, the requests can do without the copies
            logger.warning("Tangram: copying between the page pool and host memory failed: %r", error)
            return True
        return False

    def _marked(self, output: Any) -> Any:
        if self._vote is None or output is None or not get_pp_group().is_last_rank:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _MarkedLater(output, self._vote)
        return self._vote.mark(output)
