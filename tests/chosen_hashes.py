# SPDX-License-Identifier: Apache-2.0
"""Keys whose table hash is chosen: with the random words taken away, in any build."""

import os

import numpy as np


def take_random_words_away(monkeypatch):
    """Make the hashes of all pools built from now on those that `digest` says."""
    monkeypatch.setattr(os, "urandom", bytes)


def digest(table_hash, number=0):
    """Return 32 bytes; whatever ``number`` is, its product is with 0."""
    return np.array([table_hash << 32, 1, number, 0], np.uint64).tobytes()
