# SPDX-License-Identifier: Apache-2.0
"""An outside judge: NVIDIA Dynamo's standalone index, fed by our publisher over real sockets.

    pip install ai-dynamo-runtime==1.6.1 pydantic      # in an environment of its own
    CPOOL_DYNAMO_PYTHON=.../bin/python pytest -m dynamo tests/test_events_dynamo.py

After each step the index must answer, for every prompt, how many of its tokens the pool holds.
The same workload with vLLM's stream shows that the judge is not blind.
"""

import hashlib
import json
import os
import random
import socket
import subprocess
import time
import urllib.request

import pytest

import cpool

pytest.importorskip("zmq", reason="publishing needs cpool[events]")
pytest.importorskip("msgspec", reason="publishing needs cpool[events]")

from cpool.events.publisher import EventPublisher

pytestmark = pytest.mark.dynamo

HASH_BLOCK_SIZE = 4
BLOCK_SIZE = 16
MODEL = "model"
PATIENCE = 15.0  # seconds until an answer that does not come right is wrong
ANY_PORT = "tcp://127.0.0.1:*"


class Request:
    """A prompt whose tokens tell their position, so that no two places look alike."""

    lora_request = None
    mm_features = ()
    cache_salt = None
    prompt_embeds = None
    session_id = None

    def __init__(self, choices):
        self.all_token_ids = [1000 * position + choice for position, choice in enumerate(choices)]
        self.block_hashes = []
        digest = b""
        for start in range(0, len(self.all_token_ids), HASH_BLOCK_SIZE):
            part = self.all_token_ids[start : start + HASH_BLOCK_SIZE]
            digest = hashlib.sha256(digest + json.dumps(part).encode()).digest()
            self.block_hashes.append(digest)
        self.full_hashes = self.block_hashes[BLOCK_SIZE // HASH_BLOCK_SIZE - 1 :: 4]


class Index:
    """A running `dynamo.indexer` and its HTTP interface."""

    def __init__(self, python, log):
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            self.port = chosen.getsockname()[1]
        self.process = subprocess.Popen(
            [python, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"],
            stdout=log,
            stderr=log,
            env={**os.environ, "NO_COLOR": "1"},
        )

    def call(self, path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())

    def wait_until_up(self):
        end = time.monotonic() + 60
        while True:
            try:
                return self.call("/dump")
            except OSError:
                assert self.process.poll() is None, "the index ended"
                assert time.monotonic() < end, "the index did not come up"
                time.sleep(0.1)

    def register(self, instance, publisher):
        self.call(
            "/register",
            {
                "instance_id": instance,
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
                "model_name": f"{MODEL}-{instance}",
                "block_size": BLOCK_SIZE,
                "dp_rank": 0,
            },
        )

    def num_tokens(self, instance, request):
        """Tokens of a prompt that the index believes the engine holds."""
        answer = self.call(
            "/query",
            {"token_ids": request.all_token_ids, "model_name": f"{MODEL}-{instance}"},
        )
        return answer["scores"].get(str(instance), {}).get("0", 0)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    python = os.environ.get("CPOOL_DYNAMO_PYTHON")
    if not python:
        pytest.skip("CPOOL_DYNAMO_PYTHON does not name the Python of an environment with Dynamo")
    path = tmp_path_factory.mktemp("dynamo") / "index.log"
    with path.open("wb") as log:
        index = Index(python, log)
        try:
            index.wait_until_up()
            yield index
        finally:
            index.process.terminate()
            index.process.wait(30)


class Engine:
    """A pool that serves prompts, and a publisher that tells of it."""

    def __init__(self, index, instance, seed, truthful_events, late=False):
        self.index = index
        self.instance = instance
        self.random = random.Random(seed)
        self.pool = cpool.BlockPool(
            24,
            True,
            HASH_BLOCK_SIZE,
            enable_kv_cache_events=True,
            truthful_events=truthful_events,
            detailed_snapshots=late,
        )
        self.publisher = EventPublisher(self.pool, ANY_PORT, ANY_PORT, buffer_steps=2)
        self.requests = [
            Request([self.random.choice((1, 2)) if at % 20 == 0 else 0 for at in range(80)])
            for _ in range(6)
        ]
        if late:
            for _ in range(60):
                self.step()
        index.register(instance, self.publisher)
        self.wait_for_subscription(self.publisher.request_snapshot if late else self.touch_up)

    def wait_for_subscription(self, make_event):
        # A subscription takes effect some time after it is made: say something until heard.
        end = time.monotonic() + PATIENCE
        while not any(self.answered()):
            assert time.monotonic() < end, "the index does not listen"
            make_event()
            self.publisher.publish()
            time.sleep(0.1)

    def touch_up(self):
        self.pool.reset_prefix_cache()
        (block,) = self.pool.get_new_blocks(1)
        self.pool.cache_full_blocks(self.requests[0], [block], 0, 1, BLOCK_SIZE, 0)
        self.pool.free_blocks([block])

    def expected(self):
        return [
            BLOCK_SIZE * len(self.pool.find_prefix_ids(request.full_hashes, 0))
            for request in self.requests
        ]

    def answered(self):
        return [self.index.num_tokens(self.instance, request) for request in self.requests]

    def serve(self):
        """One request: take its hits or, now and then, compute everything again; then free."""
        request = self.random.choice(self.requests)
        num_blocks = self.random.randint(1, len(request.full_hashes))
        hits = []
        if self.random.random() < 0.6:
            ids = self.pool.find_prefix_ids(request.full_hashes[:num_blocks], 0)
            hits = [self.pool.blocks[int(id)] for id in ids]
        self.pool.touch(hits)
        blocks = hits + self.pool.get_new_blocks(num_blocks - len(hits))
        self.pool.cache_full_blocks(request, blocks, len(hits), num_blocks, BLOCK_SIZE, 0)
        if num_blocks < len(request.full_hashes) and self.random.random() < 0.5:
            # The tail of the prompt, findable at a boundary inside its block.
            (tail,) = self.pool.get_new_blocks(1)
            num_tokens = num_blocks * BLOCK_SIZE + HASH_BLOCK_SIZE * self.random.randint(1, 3)
            self.pool.cache_partial_block(request, tail, num_tokens, 0, BLOCK_SIZE)
            blocks.append(tail)
            if self.random.random() < 0.5:
                self.pool.cache_full_blocks(
                    request, blocks, num_blocks, num_blocks + 1, BLOCK_SIZE, 0
                )
        self.pool.free_blocks(reversed(blocks))

    def invalidate(self):
        """Evict a block and all that builds on it, as a failed load does in vLLM.

        Dynamo's index drops the children of a block that no engine holds any more. A child
        that is evicted later than its parent would be a state that it cannot represent.
        """
        request = self.random.choice(self.requests)
        first = self.random.randrange(len(request.full_hashes))
        start = first * BLOCK_SIZE // HASH_BLOCK_SIZE
        invalid = {
            digest
            for other in self.requests
            if other.full_hashes[first] == request.full_hashes[first]
            for digest in other.block_hashes[start:]
        }
        self.pool.evict_blocks(
            {
                id
                for id in range(24)
                if any(key.block_hash in invalid for key in self.pool.registrations(id))
            }
        )

    def step(self):
        choice = self.random.random()
        if choice < 0.85:
            self.serve()
        elif choice < 0.95:
            self.invalidate()
        else:
            self.pool.reset_prefix_cache()
        self.publisher.publish()

    def agrees(self, patience=PATIENCE):
        end = time.monotonic() + patience
        expected = self.expected()
        while self.answered() != expected:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


@pytest.mark.parametrize("seed", range(3))
def test_the_index_answers_what_the_pool_holds(index, seed):
    engine = Engine(index, 100 + seed, seed, truthful_events=True)
    with engine.publisher:
        for step in range(120):
            engine.step()
            assert engine.agrees(), (step, engine.answered(), engine.expected())


def test_an_index_that_comes_late_learns_all_from_a_snapshot(index):
    engine = Engine(index, 300, 7, truthful_events=True, late=True)
    with engine.publisher:
        assert sum(engine.expected()) > 0
        assert engine.agrees(), (engine.answered(), engine.expected())
        for step in range(30):
            engine.step()
            assert engine.agrees(), (step, engine.answered(), engine.expected())


def test_vllms_stream_misleads_the_index(index):
    engine = Engine(index, 200, 0, truthful_events=False)
    with engine.publisher:
        for _ in range(120):
            engine.step()
            if not engine.agrees(patience=1.0):
                return
    pytest.fail("the index agreed with vLLM's stream: the workload proves nothing")
