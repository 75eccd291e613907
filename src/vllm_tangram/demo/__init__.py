# SPDX-License-Identifier: Apache-2.0
"""What compression buys on a small real model: one scenario, run on stock vLLM and on ours with the same KV memory."""
