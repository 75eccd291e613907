# SPDX-License-Identifier: Apache-2.0
"""What compression does to answers, measured on a dense reference of the method."""
