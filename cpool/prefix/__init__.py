# SPDX-License-Identifier: Apache-2.0
"""Longest-prefix matching for models with one or several KV-cache groups."""

from cpool.prefix.cache import CopyBatch, PrefixCache, PrefixMatch, Request
from cpool.prefix.explain import Explanation, GroupReport, PartialTail, Reason
from cpool.prefix.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow

__all__ = [
    "ChunkedLocal",
    "CopyBatch",
    "Explanation",
    "FullAttention",
    "GroupReport",
    "Mamba",
    "PartialTail",
    "PrefixCache",
    "PrefixMatch",
    "Reason",
    "Request",
    "SlidingWindow",
]
