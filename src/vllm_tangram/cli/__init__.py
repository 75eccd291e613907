# SPDX-License-Identifier: Apache-2.0
"""The ``tangram`` command."""
