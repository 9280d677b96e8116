# SPDX-License-Identifier: Apache-2.0
"""The wire format: batches of events to msgpack and back.

A batch is the array ``[timestamp, events, data_parallel_rank]``. An event is a map whose first
key is ``type``, followed by its fields in order; optional fields that are None are left out.
For the same content the bytes are those of vLLM 0.32.0. Consumers written for vLLM up to 0.25
expect events as arrays, ``[type, field, field, ...]``: the encoder writes those on request, the
decoder reads both.
"""

import struct
from collections.abc import Iterable
from typing import Any

try:
    import msgspec
except ImportError as error:
    raise ImportError("encoding events needs msgspec: pip install 'cpool[events]'") from error

from cpool.events.types import AllBlocksCleared, BlockRemoved, BlockStored

__all__ = ["EventBatch", "decode_batch", "encode_batch"]


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in the order in which they happened.

    Attributes:
        ts: Unix time, in seconds, at which the batch was made.
        events: The events.
        data_parallel_rank: Rank of the engine that they are from.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class _AnyBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(EventBatch).decode
_decode_any = msgspec.msgpack.Decoder(_AnyBatch).decode

_EVENT_TYPES: dict[str, Any] = {
    cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_BATCH_LENGTH = b"\x93"


def encode_batch(
    events: Iterable[Any],
    timestamp: float,
    data_parallel_rank: int | None = None,
    legacy_array: bool = False,
) -> bytes:
    """Encode one batch.

    Args:
        events: Event objects, cpool's or vLLM's, and compact runs of events from
            ``BlockPool.take_event_batch``, which are encoded without making objects.
        timestamp: Unix time in seconds.
        data_parallel_rank: Rank of the engine; None is written as nil.
        legacy_array: Write each event as an array instead of a map.

    Returns:
        msgpack bytes.
    """
    num_events = 0
    encoded: list[bytes] = []
    for event in events:
        encode_run = getattr(event, "encode_run", None)
        if encode_run is not None:
            num_events += event.num_events
            encoded.append(encode_run(legacy_array))
        else:
            num_events += 1
            encoded.append(encode_event(event, legacy_array))
    return b"".join(
        [
            _BATCH_LENGTH,
            _encode(float(timestamp)),
            _array_header(num_events),
            *encoded,
            _encode(data_parallel_rank),
        ]
    )


def encode_event(event: Any, legacy_array: bool = False) -> bytes:
    """Encode one event object."""
    if not isinstance(event, msgspec.Struct):
        raise TypeError(f"an event is a msgspec.Struct, not {type(event).__name__}")
    return _encode(_as_array(event) if legacy_array else event)


def split_removed(removed: BlockRemoved, legacy_array: bool) -> tuple[bytes, bytes]:
    """What stands before and behind the hash of an encoded removal of the hash 0."""
    whole = encode_event(removed, legacy_array)
    place = whole.index(b"\x91\x00") + 1
    return whole[:place], whole[place + 1 :]


def split_stored(stored: BlockStored) -> tuple[bytes, bytes]:
    """An encoded store of no blocks, up to the array of hashes and behind the block size 0."""
    whole = encode_event(stored)
    place = whole.index(b"block_hashes") + len(b"block_hashes")
    behind = whole.index(b"block_size") + len(b"block_size") + 1
    return whole[:place], whole[behind:]


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one batch, whichever form its events have.

    Raises:
        msgspec.DecodeError: The bytes are not a batch of events.
    """
    try:
        return _decode(payload)
    except msgspec.ValidationError:
        batch = _decode_any(payload)
        if not any(isinstance(event, list) for event in batch.events):
            raise
    return EventBatch(
        batch.ts, [_from_array(event) for event in batch.events], batch.data_parallel_rank
    )


def _array_header(length: int) -> bytes:
    if length < 16:
        return bytes([0x90 | length])
    if length < 1 << 16:
        return struct.pack(">BH", 0xDC, length)
    return struct.pack(">BI", 0xDD, length)


def _as_array(event: Any) -> list[Any]:
    return [type(event).__name__, *(getattr(event, name) for name in event.__struct_fields__)]


def _from_array(event: Any) -> Any:
    # Fields that a later version appended are passed over, as msgspec does.
    if not isinstance(event, list) or not event or event[0] not in _EVENT_TYPES:
        raise msgspec.ValidationError(f"not an event: {event!r}")
    cls = _EVENT_TYPES[event[0]]
    fields = dict(zip(cls.__struct_fields__, event[1:], strict=False))
    for name, default in zip(
        cls.__struct_fields__[::-1], cls.__struct_defaults__[::-1], strict=False
    ):
        fields.setdefault(name, default)
    # Streams from before these fields existed.
    for name in ("medium", "lora_name"):
        if name in cls.__struct_fields__:
            fields.setdefault(name, None)
    return msgspec.convert(fields | {"type": cls.__name__}, cls)
