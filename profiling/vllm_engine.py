# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on a CPU: a tiny Llama with random weights, and all that it decided.

    python profiling/vllm_engine.py --mode inprocess
    CPOOL_DISABLE=1 python profiling/vllm_engine.py --mode inprocess

Both print one JSON object: output tokens, cached tokens of each request, KV events, number of
preemptions. What an engine decides must not depend on whose pool it runs on, so the two must
be equal but for "pool" and "seconds". Modes: ``inprocess``, where requests run together in a
pool that is too small for them; ``multiprocess``, with the EngineCore as a process of its own,
and ``serve``, a ``vllm serve`` asked over HTTP. In those two requests run one by one, because
their arrival is not reproducible.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
BLOCK_SIZE = 32
# Room for about a third of the requests that run together.
NUM_BLOCKS = 49
NUM_OUTPUT_TOKENS = 48
ENGINE_ARGUMENTS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enable_prefix_caching": True,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "enforce_eager": True,
    "dtype": "float32",
    "seed": 0,
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
}


def make_conversations(num_prefixes: int, num_each: int) -> list[list[int]]:
    """Returns prompts in groups that share a prefix of about 160 tokens."""
    generator = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(3, 32000) for _ in range(count)]

    prefixes = [tokens(150 + 13 * i) for i in range(num_prefixes)]
    return [
        prefix + tokens(generator.randint(5, 120)) for prefix in prefixes for _ in range(num_each)
    ]


class EventListener:
    """Collects what the engine publishes as KV events, decoded but not interpreted."""

    def __init__(self, port: int) -> None:
        import zmq

        self.events: list[Any] = []
        self.num_batches = 0
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVTIMEO, 2000)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.stopping = False
        self.thread = threading.Thread(target=self.listen)
        self.thread.start()

    def listen(self) -> None:
        import msgspec
        import zmq

        while True:
            try:
                _, sequence, payload = self.socket.recv_multipart()
            except zmq.Again:
                if self.stopping:
                    return
                continue
            assert int.from_bytes(sequence, "big") == self.num_batches, "a batch was lost"
            self.num_batches += 1
            self.events += msgspec.msgpack.decode(payload)[1]

    def stop(self) -> list[Any]:
        """Returns the events, once the socket has been silent for a while."""
        self.stopping = True
        self.thread.join()
        self.socket.close()
        return self.events


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def events_config(port: int) -> dict[str, Any]:
    # With a star vLLM binds; it would connect to an address.
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
    }


def run_with_llm(model: str, together: bool) -> dict[str, Any]:
    """Runs turns of conversations through ``vllm.LLM``."""
    port = free_port()
    listener = EventListener(port)
    try:
        from vllm import LLM, SamplingParams
        from vllm.config.kv_events import KVEventsConfig

        llm = LLM(
            model=model,
            disable_log_stats=False,
            kv_events_config=KVEventsConfig(**events_config(port)),
            **ENGINE_ARGUMENTS,
        )
        sampling = SamplingParams(
            temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, detokenize=False
        )

        def ask(prompts: list[list[int]]) -> list[tuple[list[int], int]]:
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            batches = [inputs] if together else [[each] for each in inputs]
            return [
                (list(output.outputs[0].token_ids), output.num_cached_tokens)
                for batch in batches
                for output in llm.generate(batch, sampling, use_tqdm=False)
            ]

        started = time.perf_counter()
        answers = converse(ask, llm.reset_prefix_cache)
        seconds = time.perf_counter() - started
        counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        pool = None
        if together:
            core = llm.llm_engine.engine_core.engine_core
            kind = type(core.scheduler.kv_cache_manager.block_pool)
            pool = f"{kind.__module__}.{kind.__qualname__}"
        result = answers | {
            "preemptions": counters["vllm:num_preemptions"],
            "pool": pool,
            "seconds": round(seconds, 2),
        }
    finally:
        events = listener.stop()
    llm.llm_engine.engine_core.shutdown()
    return result | {"events": events}


def converse(ask: Any, reset: Any) -> dict[str, Any]:
    """Three turns, a reset between the second and the third; returns tokens and hits."""
    prompts = make_conversations(num_prefixes=3, num_each=4)
    tokens: list[list[int]] = []
    cached: list[int] = []
    resets = []
    for turn in range(3):
        if turn == 2:
            resets.append(bool(reset()))
        answers = ask(prompts)
        tokens += [answer for answer, _ in answers]
        cached += [hits for _, hits in answers]
        prompts = [
            prompt + answer + [100 + turn] * 9
            for prompt, (answer, _) in zip(prompts, answers, strict=True)
        ]
    return {"tokens": tokens, "cached": cached, "resets": resets}


def name_vllm(folder: Path) -> None:
    """Makes the distribution that ``vllm serve`` asks for: the CPU build has another name."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        information = folder / "vllm-0.dist-info"
        information.mkdir()
        # vLLM takes its platform from the version's suffix.
        version = metadata.version("vllm-cpu") + "+cpu"
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


class Server:
    """A ``vllm serve`` of its own, on loopback."""

    def __init__(self, model: str, log: Path) -> None:
        self.port, self.events_port = free_port(), free_port()
        self.log = log
        flags: list[str] = []
        for name, value in ENGINE_ARGUMENTS.items():
            flag = "--" + name.replace("_", "-")
            flags += [flag] if value is True else [flag, str(value)]
        self.output = log.open("w")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model),
                *("--tokens-only", "--host", "127.0.0.1", "--port", str(self.port)),
                *("--kv-events-config", json.dumps(events_config(self.events_port))),
                *flags,
            ],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_until_ready(self, seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        raise RuntimeError(f"vllm serve did not start:\n{self.log.read_text()[-4000:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read() or "null")

    def counter(self, name: str) -> float:
        found = re.findall(rf"^vllm:{name}_total\{{.*\}} (\S+)$", self.get("/metrics"), re.M)
        return sum(map(float, found))

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(60)
        self.output.close()


def run_with_server(model: str) -> dict[str, Any]:
    name_vllm(Path(model))
    server = Server(model, Path(model) / "serve.log")
    listener = EventListener(server.events_port)
    try:
        server.wait_until_ready()
        sampling = {"temperature": 0, "max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True}

        def ask(prompts: list[list[int]]) -> list[tuple[list[int], int]]:
            answers = []
            for prompt in prompts:
                hits = server.counter("prefix_cache_hits")
                answer = server.post(
                    "/inference/v1/generate",
                    {"token_ids": prompt, "sampling_params": sampling, "stream": False},
                )
                hits = server.counter("prefix_cache_hits") - hits
                answers.append((answer["choices"][0]["token_ids"], int(hits)))
            return answers

        def reset() -> bool:
            server.post("/reset_prefix_cache")
            return True

        started = time.perf_counter()
        answers = converse(ask, reset)
        result = answers | {
            "preemptions": server.counter("num_preemptions"),
            "pool": None,
            "seconds": round(time.perf_counter() - started, 2),
        }
    finally:
        server.stop()
        events = listener.stop()
        sys.stderr.write(server.log.read_text())
    return result | {"events": events}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["inprocess", "multiprocess", "serve"], required=True)
    mode = parser.parse_args().mode
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if mode == "inprocess" else "1"
    # vLLM's own lines must not get between ours and whoever reads them.
    standard_output = os.dup(1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL_CONFIG))
        if mode == "serve":
            result = run_with_server(model)
        else:
            result = run_with_llm(model, together=mode == "inprocess")
    os.write(standard_output, json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    main()
