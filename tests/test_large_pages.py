# SPDX-License-Identifier: Apache-2.0
"""Where pages are larger than 4 KiB, no memory is given back that keys are in.

arm64 and ppc64le have such kernels. Here a library before libc's rounds as theirs do.
"""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux alone"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

KERNEL_OF_LARGE_PAGES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 65536 };
static int num_given_back;

int madvise(void *start, size_t nbytes, int advice) {
    int (*real)(void *, size_t, int) = (int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "madvise");
    if (advice == MADV_DONTNEED) {
        if ((uintptr_t)start % PAGE) {
            errno = EINVAL;
            return -1;
        }
        nbytes = (nbytes + PAGE - 1) & ~(size_t)(PAGE - 1);
        num_given_back++;
    }
    return real(start, nbytes, advice);
}

long sysconf(int name) {
    long (*real)(int) = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_PAGESIZE ? PAGE : real(name);
}

__attribute__((destructor)) static void say(void) { printf("%d\n", num_given_back); }
"""

# Where memory begins differs from run to run. A step in which it is given back is more than two
# pages; as if pages were of 4 KiB, one of two growths loses keys.
GROWTH = """
import numpy as np
from cpool import BlockPool

num_blocks, step = 200_000, 3000
ids = np.arange(num_blocks) + 1
rows = np.random.default_rng(0).integers(0, 256, (2 * num_blocks, 32), np.uint8)
order = np.random.default_rng(0).permutation(num_blocks)    # in theirs the table is not asked
for _ in range(6):
    pool = BlockPool(num_blocks + 1, True, 4)
    pool.cache_full_ids(ids, rows[:num_blocks], 0, 8)
    start, growing = num_blocks, 0
    while not growing or pool.table_stats()["num_leaving"]:
        extra = rows[start : start + step]
        pool.cache_partial_ids(ids[:step], extra, [4] * step, 0)
        start += step
        if pool.table_stats()["num_leaving"]:
            growing += 1
            assert (pool.find_ids(rows[order], 0) == ids[order]).all()
    assert (pool.find_ids(rows[order], 0) == ids[order]).all()
"""


def test_keys_behind_the_last_page_that_is_given_back_stay(tmp_path):
    source, library = tmp_path / "pages.c", tmp_path / "pages.so"
    source.write_text(KERNEL_OF_LARGE_PAGES)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60
    )
    preload = f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()
    done = subprocess.run(
        [sys.executable, "-P", "-c", GROWTH],
        env={**os.environ, "LD_PRELOAD": preload},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
