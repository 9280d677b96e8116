# SPDX-License-Identifier: Apache-2.0
"""KV-cache block pool for LLM serving: vLLM's decisions in flat C arrays."""
