# SPDX-License-Identifier: Apache-2.0
"""The one exception type that callers of this package need to know."""


class TangramError(ValueError):
    """A request, option or file that cannot be used; the message says which, why and what to do."""
