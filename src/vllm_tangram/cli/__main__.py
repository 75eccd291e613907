# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_tangram.cli``."""

from vllm_tangram.cli.app import main

main()
