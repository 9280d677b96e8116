# SPDX-License-Identifier: Apache-2.0
"""Replay of request traces through a block pool: readers, made-up workloads, reports."""
