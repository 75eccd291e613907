# SPDX-License-Identifier: Apache-2.0
"""Making gates: KVzip's scores of texts, training towards them, and conversion of published checkpoints."""
