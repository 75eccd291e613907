# SPDX-License-Identifier: Apache-2.0
"""Where the retained keys and values live: the pool's layout and the worker's page tables.

``table`` and ``reference`` are imported from their modules: numba must not be loaded in processes that only need sizes.
"""

from vllm_tangram.pages.layout import PageLayout

__all__ = ["PageLayout"]
