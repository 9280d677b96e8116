# SPDX-License-Identifier: Apache-2.0
"""The publisher over real sockets: order, gaps, replay, late consumers, ranks, shutdown."""

import logging
import threading
import time

import pytest

zmq = pytest.importorskip("zmq", reason="publishing needs cpool[events]")
pytest.importorskip("msgspec", reason="publishing needs cpool[events]")

import cpool  # noqa: E402
from cpool.events.publisher import END_OF_REPLAY, EventPublisher, offset_endpoint  # noqa: E402
from cpool.events.wire import decode_batch, encode_batch  # noqa: E402

from .events_driver import (  # noqa: E402
    BLOCK_SIZE,
    HASH_BLOCK_SIZE,
    Consumer,
    Driver,
    Request,
    pool_keys,
)

TIMEOUT = 20_000  # milliseconds; reached only when something is broken
ANY_PORT = "tcp://127.0.0.1:*"


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


@pytest.fixture
def sockets():
    made = []

    def connect(kind, endpoint):
        socket = zmq.Context.instance().socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT)
        if kind == zmq.SUB:
            socket.set_hwm(0)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        made.append(socket)
        return socket

    yield connect
    for socket in made:
        socket.close(0)


class Feed:
    """Gives a pool something to say: one block comes or goes at each call."""

    def __init__(self, pool, group=0):
        self.pool = pool
        self.group = group
        self.ids = pool.get_new_block_ids(1)
        self.digest = Request(list(range(BLOCK_SIZE))).full_hashes()
        self.is_stored = False

    def __call__(self):
        if self.is_stored:
            self.pool.evict_ids(self.ids)
        else:
            self.pool.cache_full_ids(self.ids, self.digest, self.group, BLOCK_SIZE)
        self.is_stored = not self.is_stored


def make_pool(num_blocks=8):
    return cpool.BlockPool(
        num_blocks, True, HASH_BLOCK_SIZE, enable_kv_cache_events=True, truthful_events=True
    )


def until(condition):
    end = time.monotonic() + TIMEOUT / 1000
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def publish_first(publisher, feed, subscriber):
    """Publish until the subscription has taken effect; returns the last message."""
    poller = zmq.Poller()
    poller.register(subscriber, zmq.POLLIN)
    end = time.monotonic() + TIMEOUT / 1000
    while True:
        feed()
        sequence = publisher.publish()
        while poller.poll(50):
            message = receive(subscriber)
            if message[1] == sequence:
                return message
        assert time.monotonic() < end


def receive(subscriber):
    topic, sequence, payload = subscriber.recv_multipart()
    return topic, int.from_bytes(sequence, "big"), decode_batch(payload)


def replay(socket, first):
    """(topic, sequence, payload) of each batch that the publisher keeps from `first` on."""
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    while True:
        empty, topic, sequence, payload = socket.recv_multipart()
        assert empty == b""
        if sequence == END_OF_REPLAY:
            assert (topic, payload) == (b"", b"")
            return batches
        batches.append((topic, int.from_bytes(sequence, "big"), payload))


def test_messages_carry_topic_sequence_and_batch(sockets):
    pool = make_pool()
    feed = Feed(pool)
    with EventPublisher(pool, ANY_PORT, topic="kv@engine", data_parallel_rank=0) as publisher:
        subscriber = sockets(zmq.SUB, publisher.endpoint)
        topic, sequence, batch = publish_first(publisher, feed, subscriber)
        assert topic == b"kv@engine"
        assert batch.data_parallel_rank == 0
        assert abs(batch.ts - time.time()) < 60
        assert publisher.publish() is None
        for step in range(1, 20):
            feed()
            assert publisher.publish() == sequence + step
            assert receive(subscriber)[1] == sequence + step


def test_a_subscriber_ends_with_what_the_pool_holds(sockets):
    driver = Driver(3, truthful_events=True)
    with EventPublisher(driver.pool, ANY_PORT, ANY_PORT) as publisher:
        subscriber = sockets(zmq.SUB, publisher.endpoint)
        consumer = Consumer()
        last = None
        while publisher.num_sent_batches < 200:
            driver.step()
            sequence = publisher.publish()
            last = last if sequence is None else sequence
            time.sleep(0)
        until(lambda: publisher.num_sent_batches == last + 1)
        # What went out before the subscription is replayed.
        batches = replay(sockets(zmq.DEALER, publisher.replay_endpoint), 0)
        assert [batch[1] for batch in batches] == list(range(last + 1))
        for _, _, payload in batches:
            consumer.apply(decode_batch(payload).events)
        assert consumer.keys == pool_keys(driver.pool)
        sequence = None
        while sequence != last:
            _, sequence, batch = receive(subscriber)
            assert batch == decode_batch(batches[sequence][2])


def test_replay_from_the_middle_and_past_the_end(sockets):
    pool = make_pool()
    feed = Feed(pool)
    with EventPublisher(pool, ANY_PORT, ANY_PORT, topic="t", buffer_steps=5) as publisher:
        for _ in range(12):
            feed()
            publisher.publish()
        until(lambda: publisher.num_sent_batches == 12)
        socket = sockets(zmq.DEALER, publisher.replay_endpoint)
        assert [batch[:2] for batch in replay(socket, 9)] == [(b"t", 9), (b"t", 10), (b"t", 11)]
        assert replay(socket, 12) == []
        assert publisher.num_snapshots == 0
        feed()
        publisher.publish()
        until(lambda: publisher.num_sent_batches == 13)
        assert publisher.num_snapshots == 0  # nothing stale was asked for
        assert [batch[1] for batch in replay(socket, 0)] == [8, 9, 10, 11, 12]


def test_a_late_consumer_is_given_a_snapshot(sockets):
    driver = Driver(5, truthful_events=True)
    with EventPublisher(driver.pool, ANY_PORT, ANY_PORT, buffer_steps=2) as publisher:
        while publisher.num_sent_batches < 20:
            driver.step()
            publisher.publish()
            time.sleep(0)
        consumer = Consumer()
        socket = sockets(zmq.DEALER, publisher.replay_endpoint)
        assert len(replay(socket, 0)) == 2  # too little; but the request asked for more
        sequence = publisher.publish()
        until(lambda: publisher.num_snapshots == 1)
        batches = []
        until(lambda: batches.extend(replay(socket, sequence)) or batches)
        for _, _, payload in batches[:1]:
            consumer.apply(decode_batch(payload).events)
        assert consumer.keys == pool_keys(driver.pool)


def test_a_full_queue_loses_a_batch_and_mends_it(sockets, caplog, monkeypatch):
    # The thread is held where it encodes; what it does afterwards is real.
    gate = threading.Event()
    entered = threading.Event()

    def wait_and_encode(*arguments):
        entered.set()
        gate.wait()
        return encode_batch(*arguments)

    monkeypatch.setattr("cpool.events.publisher.encode_batch", wait_and_encode)
    pool = make_pool()
    feeds = [Feed(pool, group) for group in range(3)]
    with EventPublisher(pool, ANY_PORT, ANY_PORT, max_queue_size=3) as publisher:
        feeds[0]()
        first = publisher.publish()
        entered.wait()
        with caplog.at_level(logging.WARNING, "cpool.events"):
            for step in range(10):
                feeds[step % 3]()
                publisher.publish()
        assert publisher.num_gaps == 1
        assert publisher.num_lost_batches == 8  # 3 wait, the one being sent among them
        assert len([r for r in caplog.records if "lost" in r.getMessage()]) == 1
        gate.set()
        until(lambda: publisher.num_sent_batches == 3)
        feeds[0]()
        last = publisher.publish()
        until(lambda: publisher.num_sent_batches == 4)
        assert publisher.num_snapshots == 1
        batches = replay(sockets(zmq.DEALER, publisher.replay_endpoint), 0)
        # The gap shows in the numbers, and what follows it tells everything.
        assert [batch[1] - first for batch in batches] == [0, 1, 2, 11]
        assert batches[-1][1] == last
        consumer = Consumer()
        for _, _, payload in batches:
            consumer.apply(decode_batch(payload).events)
        assert consumer.keys == pool_keys(pool)
        assert consumer.keys


def test_a_batch_that_cannot_be_encoded_is_followed_by_a_snapshot(sockets, caplog):
    pool = make_pool()
    feed = Feed(pool)
    with EventPublisher(pool, ANY_PORT, ANY_PORT) as publisher:
        pool.kv_event_queue.append(object())
        feed()
        with caplog.at_level(logging.ERROR, "cpool.events"):
            publisher.publish()
            until(lambda: publisher.num_lost_batches == 1)
        until(lambda: "could not be sent" in caplog.text)
        publisher.publish()
        until(lambda: publisher.num_sent_batches == 1)
        ((_, _, payload),) = replay(sockets(zmq.DEALER, publisher.replay_endpoint), 1)
        consumer = Consumer()
        consumer.apply(decode_batch(payload).events)
        assert consumer.keys == pool_keys(pool)
        assert consumer.keys


def test_a_publisher_of_a_pool_that_has_a_history_begins_with_a_snapshot(sockets):
    pool = make_pool()
    feed = Feed(pool)
    feed()
    pool.take_events()
    with EventPublisher(pool, ANY_PORT, ANY_PORT) as publisher:
        assert publisher.publish() == 1
        until(lambda: publisher.num_sent_batches == 1)
        ((_, _, payload),) = replay(sockets(zmq.DEALER, publisher.replay_endpoint), 1)
        consumer = Consumer()
        consumer.apply(decode_batch(payload).events)
        assert consumer.keys == pool_keys(pool)


def test_what_is_no_request_for_replay_is_passed_over(sockets, caplog):
    pool = make_pool()
    with EventPublisher(pool, ANY_PORT, ANY_PORT) as publisher:
        socket = sockets(zmq.DEALER, publisher.replay_endpoint)
        with caplog.at_level(logging.WARNING, "cpool.events"):
            socket.send_multipart([b"", b"short"])
            socket.send_multipart([b"no", b"such", b"thing"])
            assert replay(socket, 0) == []
        assert caplog.text.count("not a replay request") == 2


def test_the_replay_buffer_is_bounded_in_bytes(sockets):
    pool = make_pool()
    feed = Feed(pool)
    with EventPublisher(pool, ANY_PORT, ANY_PORT, buffer_bytes=300) as publisher:
        for _ in range(20):
            feed()
            publisher.publish()
        until(lambda: publisher.num_sent_batches == 20)
        batches = replay(sockets(zmq.DEALER, publisher.replay_endpoint), 0)
        assert 0 < sum(len(payload) for _, _, payload in batches) <= 300
        assert batches[-1][1] == 19


def test_ranks_publish_side_by_side(sockets):
    pools = [make_pool() for _ in range(2)]
    feeds = [Feed(pool) for pool in pools]
    base = "inproc://cpool-test"
    publishers = [
        EventPublisher(pool, base, data_parallel_rank=rank) for rank, pool in enumerate(pools)
    ]
    try:
        for rank, publisher in enumerate(publishers):
            subscriber = sockets(zmq.SUB, offset_endpoint(base, rank))
            _, _, batch = publish_first(publisher, feeds[rank], subscriber)
            assert batch.data_parallel_rank == rank
    finally:
        for publisher in publishers:
            publisher.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://127.0.0.1:0", 2, "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:*", 2, "tcp://127.0.0.1:*"),
        ("inproc://cache", 0, "inproc://cache"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("ipc:///run/kv", 2, "ipc:///run/kv_dp2"),
    ],
)
def test_each_rank_has_an_endpoint_of_its_own(endpoint, rank, expected):
    assert offset_endpoint(endpoint, rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "rank"),
    [
        ("5557", 0),
        ("udp://host:1", 0),
        ("tcp://host", 0),
        ("tcp://host:port", 1),
        ("tcp://*:65535", 1),
        ("tcp://*:5557", -1),
    ],
)
def test_endpoints_that_are_none_are_refused(endpoint, rank):
    with pytest.raises(ValueError, match=r"endpoint|rank"):
        offset_endpoint(endpoint, rank)


def test_bad_arguments_are_refused_before_a_socket_is_opened():
    with pytest.raises(ValueError, match="enable_kv_cache_events"):
        EventPublisher(cpool.BlockPool(4, True, 16), ANY_PORT)
    for limit in ("buffer_steps", "max_queue_size"):
        with pytest.raises(ValueError, match=limit):
            EventPublisher(make_pool(), ANY_PORT, **{limit: 0})


def test_shutdown_sends_what_waits_and_ends_the_thread(sockets):
    pool = make_pool()
    feed = Feed(pool)
    publisher = EventPublisher(pool, ANY_PORT)
    subscriber = sockets(zmq.SUB, publisher.endpoint)
    _, sequence, _ = publish_first(publisher, feed, subscriber)
    for _ in range(50):
        feed()
        publisher.publish()
    publisher.shutdown(timeout=TIMEOUT / 1000)
    for step in range(1, 51):
        assert receive(subscriber)[1] == sequence + step
    assert not any(thread.name == "cpool-events" for thread in threading.enumerate())
    publisher.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        publisher.publish()
