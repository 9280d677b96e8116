# SPDX-License-Identifier: Apache-2.0
"""What README shows runs, and does what it says."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent.parent / "README.md"


def test_its_examples_run(capsys: Any) -> None:
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(compile(example, README.name, "exec"), names)
    pool, cache = names["pool"], names["cache"]
    assert len(names["hashes"]) == pool.num_registrations == 400
    assert capsys.readouterr().out.startswith("1,984 of 1,992 tokens hit: ")
    # Nothing is left held.
    assert pool.get_num_free_blocks() == 999_999
    assert cache.pool.get_num_free_blocks() == 9_999
