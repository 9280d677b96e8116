# SPDX-License-Identifier: Apache-2.0
"""Publish a pool's events over ZeroMQ.

The caller's thread takes events from the pool and puts them into a bounded queue, nothing
more. One background thread encodes and sends them, keeps the last batches for replay, and
answers replay requests. It never touches the pool.

    PUB      [topic, sequence, payload]
    ROUTER   request  [client, b"", first sequence]
             replies  [client, b"", topic, sequence, payload] for each batch that is kept,
                      [client, b"", b"", -1, b""] at the end

Sequences are 8 bytes big-endian, payloads those of `cpool.events.wire`: what consumers of vLLM
expect. States of the stream: WHOLE -> (a batch is lost) -> BROKEN -> (a snapshot is queued) ->
WHOLE. A lost batch uses up its sequence number, so consumers see a gap; the batch after the gap
clears and stores all that is resident, so they need not act on it.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import Any

try:
    import zmq
except ImportError as error:
    raise ImportError("publishing events needs pyzmq: pip install 'cpool[events]'") from error

from cpool.events.wire import encode_batch

__all__ = ["EventPublisher", "offset_endpoint"]

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

logger = logging.getLogger("cpool.events")


def offset_endpoint(endpoint: str, data_parallel_rank: int) -> str:
    """The endpoint of one data-parallel rank: a TCP port plus the rank, or a name with it.

    Ports that the system chooses (0 or ``*``) stay as they are.

    Raises:
        ValueError: The endpoint is none of tcp, ipc and inproc, or has no port.
    """
    if not isinstance(endpoint, str):
        raise TypeError(f"endpoint must be str, not {type(endpoint).__name__}")
    if not hasattr(data_parallel_rank, "__index__"):
        raise TypeError(
            f"data_parallel_rank must be an integer, not {type(data_parallel_rank).__name__}"
        )
    if data_parallel_rank < 0:
        raise ValueError(f"data_parallel_rank is {data_parallel_rank}; it must be at least 0")
    kind, separator, address = endpoint.partition("://")
    if not separator or kind not in ("tcp", "ipc", "inproc"):
        raise ValueError(f"endpoint {endpoint!r} must start with tcp://, ipc:// or inproc://")
    if kind != "tcp":
        return f"{endpoint}_dp{data_parallel_rank}" if data_parallel_rank else endpoint
    host, separator, port = address.rpartition(":")
    if port == "*":
        return endpoint
    if not separator or not port.isdecimal():
        raise ValueError(f"endpoint {endpoint!r} has no port")
    if int(port) == 0:
        return f"tcp://{host}:*"
    if int(port) + data_parallel_rank > 65535:
        raise ValueError(f"port {port} plus rank {data_parallel_rank} is above 65535")
    return f"tcp://{host}:{int(port) + data_parallel_rank}"


class _ReplayBuffer:
    """The last batches, bounded in number and in bytes."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def append(self, sequence: int, payload: bytes) -> None:
        self._batches.append((sequence, payload))
        self._num_bytes += len(payload)
        while self._batches and (
            len(self._batches) > self._max_batches or self._num_bytes > self._max_bytes
        ):
            self._num_bytes -= len(self._batches.popleft()[1])

    def since(self, sequence: int) -> list[tuple[int, bytes]]:
        return [batch for batch in self._batches if batch[0] >= sequence]


class EventPublisher:
    """Publishes the events of one pool.

    Call `publish` once per step of the engine, from the thread that uses the pool. It never
    blocks and never raises for want of room: when the queue is full the batch is lost, which
    is counted in ``num_lost_batches``, logged once per gap, and mended by a snapshot at the
    start of the first batch that fits again.

    Args:
        pool: A `cpool.BlockPool` with ``enable_kv_cache_events``; ``truthful_events`` is
            advised, since a snapshot tells the truth and vLLM's stream does not.
        endpoint: PUB address. One with ``*`` or ``::``, and ipc and inproc, are bound, others
            connected, as in vLLM. ``tcp://127.0.0.1:*`` lets the system choose a port, which
            the attribute ``endpoint`` then tells.
        replay_endpoint: ROUTER address, bound; None for no replay.
        topic: First frame of each message.
        data_parallel_rank: Added to TCP ports and reported in each batch.
        buffer_steps: Batches kept for replay, at most.
        buffer_bytes: Bytes of payload kept for replay, at most.
        hwm: Messages that ZeroMQ queues for a slow subscriber before it drops them.
        max_queue_size: Batches that wait for the background thread, at most.
        legacy_array: Encode events as arrays, for consumers older than vLLM 0.26.
        snapshot_on_stale_replay: Whether a replay request for batches that are no longer kept
            makes the next batch a snapshot, so that a late consumer catches up.

    Raises:
        ValueError: The pool has no events, or an endpoint or a limit is not one.
        zmq.ZMQError: An address cannot be bound.
    """

    def __init__(
        self,
        pool: Any,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        data_parallel_rank: int = 0,
        buffer_steps: int = 10_000,
        buffer_bytes: int = 1 << 28,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        legacy_array: bool = False,
        snapshot_on_stale_replay: bool = True,
    ) -> None:
        if not hasattr(pool, "take_event_runs"):
            raise TypeError(f"pool must be a BlockPool, not {type(pool).__name__}")
        if not isinstance(topic, str):
            raise TypeError(f"topic must be str, not {type(topic).__name__}")
        if not pool.enable_kv_cache_events:
            raise ValueError("the pool was made without enable_kv_cache_events")
        for name, limit in (
            ("buffer_steps", buffer_steps),
            ("buffer_bytes", buffer_bytes),
            ("hwm", hwm),
            ("max_queue_size", max_queue_size),
        ):
            if not hasattr(limit, "__index__"):
                raise TypeError(f"{name} must be an integer, not {type(limit).__name__}")
            lowest = 1 if name in ("buffer_steps", "max_queue_size") else 0
            if limit < lowest:
                raise ValueError(f"{name} is {limit}; it must be at least {lowest}")
        endpoint = offset_endpoint(endpoint, data_parallel_rank)
        if replay_endpoint is not None:
            replay_endpoint = offset_endpoint(replay_endpoint, data_parallel_rank)
        self._pool = pool
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._legacy_array = legacy_array
        self._snapshot_on_stale_replay = snapshot_on_stale_replay
        self._max_queue_size = max_queue_size
        # Both ends of a deque may be used from two threads without a lock.
        self._queue: deque[tuple[int, float, list[Any]]] = deque()
        self._buffer = _ReplayBuffer(buffer_steps, buffer_bytes)
        # What the pool holds already, no subscriber of ours was told.
        self._needs_snapshot = pool.num_event_batches > 0 or pool.num_cached_keys > 0
        self._next_to_send = pool.num_event_batches
        self._is_in_gap = False
        self._is_closing = False
        self._deadline = float("inf")

        self.num_lost_batches = 0
        self.num_gaps = 0
        self.num_snapshots = 0
        self.num_sent_batches = 0

        context: zmq.Context[Any] = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._replay = None
        try:
            self._pub.set_hwm(hwm)
            if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc", "inproc")):
                self._pub.bind(endpoint)
                endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
            else:
                self._pub.connect(endpoint)
            if replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                # What is kept is bounded, so a reply may be queued whole.
                self._replay.set_hwm(0)
                self._replay.bind(replay_endpoint)
                replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self._close_sockets()
            raise
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        # From here on the sockets belong to the thread.
        self._thread = threading.Thread(target=self._run, name="cpool-events", daemon=True)
        self._thread.start()

    def publish(self) -> int | None:
        """Hand over what happened in the pool since the last call.

        Returns:
            The batch's sequence number, also when the batch is lost; None when nothing
            happened.

        Raises:
            RuntimeError: The publisher was shut down.
        """
        if self._is_closing:
            raise RuntimeError("the publisher was shut down")
        has_room = len(self._queue) < self._max_queue_size
        with_snapshot = self._needs_snapshot and has_room
        if with_snapshot:
            self._needs_snapshot = False  # before it is taken: the thread may ask for another
        runs = self._pool.take_event_runs(snapshot=with_snapshot)
        if not runs:
            return None
        sequence = self._pool.num_event_batches - 1
        if not has_room:
            self._count_loss(sequence)
            return sequence
        self.num_snapshots += with_snapshot
        self._is_in_gap = False
        self._queue.append((sequence, time.time(), runs))
        self._wake()
        return sequence

    def request_snapshot(self) -> None:
        """Make the next batch a snapshot. May be called from any thread."""
        self._needs_snapshot = True

    def shutdown(self, timeout: float = 1.0) -> None:
        """Send what waits, for at most ``timeout`` seconds, and close the sockets."""
        if self._is_closing:
            return
        self._deadline = time.monotonic() + timeout
        self._is_closing = True
        self._wake()
        self._thread.join(timeout + 1.0)
        if not self._thread.is_alive():
            os.close(self._wake_reader)
            os.close(self._wake_writer)
        if self._queue:
            logger.warning("KV event publisher shut down with %d batches unsent", len(self._queue))

    def __enter__(self) -> "EventPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _count_loss(self, sequence: int) -> None:
        self.num_lost_batches += 1
        self._needs_snapshot = True
        if self._is_in_gap:
            return
        self._is_in_gap = True
        self.num_gaps += 1
        logger.warning(
            "KV event queue is full (%d batches): batches from %d on are lost; a snapshot "
            "follows when there is room",
            self._max_queue_size,
            sequence,
        )

    def _wake(self) -> None:
        # A full pipe is full of wake-ups that the thread has not read yet.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")

    # On the background thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not (self._is_closing and not self._queue):
                ready = dict(poller.poll())
                if self._wake_reader in ready:
                    os.read(self._wake_reader, 1 << 16)
                if self._replay in ready:
                    self._answer()
                while self._queue and time.monotonic() < self._deadline:
                    self._send(*self._queue[0])
                    self._queue.popleft()
                    if self._replay is not None and self._replay.poll(0):
                        self._answer()
                if time.monotonic() >= self._deadline:
                    break
        finally:
            self._close_sockets()

    def _send(self, sequence: int, timestamp: float, runs: list[Any]) -> None:
        self._next_to_send = sequence + 1
        try:
            payload = encode_batch(runs, timestamp, self._rank, self._legacy_array)
            self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
        except Exception:
            self.num_lost_batches += 1
            self._needs_snapshot = True
            logger.exception("KV event batch %d could not be sent", sequence)
            return
        self._buffer.append(sequence, payload)
        self.num_sent_batches += 1

    def _answer(self) -> None:
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            logger.warning("not a replay request: %d frames", len(frames))
            return
        client = frames[0]
        first = int.from_bytes(frames[2], "big")
        batches = self._buffer.since(first)
        oldest = batches[0][0] if batches else self._next_to_send
        if first < oldest and self._snapshot_on_stale_replay:
            # Before the answer: whoever has it may rely on the next batch.
            self._needs_snapshot = True
        for sequence, payload in batches:
            self._replay.send_multipart(
                (client, b"", self._topic, sequence.to_bytes(8, "big"), payload)
            )
        self._replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def _close_sockets(self) -> None:
        # The last messages may still be on their way to subscribers.
        self._pub.close(linger=500)
        if self._replay is not None:
            self._replay.close(linger=500)
