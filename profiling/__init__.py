# SPDX-License-Identifier: Apache-2.0
"""Time and memory of cpool against stock vLLM, and against what the machine allows.

    python -m profiling --vllm-python PATH [--quick] [--out FOLDER]

Operations are defined once (`operations`) and run through the interfaces of `interfaces`; the
command writes JSON, a Markdown report, plots and memray's pages into one folder.
"""
