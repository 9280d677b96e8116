# SPDX-License-Identifier: Apache-2.0
"""Describes the vLLM that is installed, in the form of the files in ``contracts/``."""

import json

from cpool.vllm.contract import describe

print(json.dumps(describe(), indent=1, sort_keys=True))
