# SPDX-License-Identifier: Apache-2.0
from typing import NamedTuple
class PartialTail(NamedTuple):
    group: int
    block_id: int
    num_tokens: int
    ref_cnt: int
def explain(match):
    raise NotImplementedError
