"""Look into the header of an Arrow message: whether the bytes that follow are compressed.

The header is a flatbuffer (Arrow's format/Message.fbs), which pyarrow offers no look into.
"""

import struct

_HEADER_TYPE, _HEADER = 1, 2  # fields of Message
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3  # types of header
_DATA, _COMPRESSION = 1, 3  # fields of DictionaryBatch and of RecordBatch


def is_compressed(metadata: bytes) -> bool:
    """Return whether a message holds compressed buffers; ValueError for what is no message."""
    try:
        message = _followed(metadata, 0)
        at = _field(metadata, message, _HEADER_TYPE)
        kind = metadata[at] if at else 0
        header = _field(metadata, message, _HEADER)
        if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH) or not header:
            return False
        batch = _followed(metadata, header)
        if kind == _DICTIONARY_BATCH:
            data = _field(metadata, batch, _DATA)
            if not data:
                return False
            batch = _followed(metadata, data)
        return _field(metadata, batch, _COMPRESSION) != 0
    except (struct.error, IndexError):
        raise ValueError("a message that can't be read") from None


def _followed(content: bytes, at: int) -> int:
    """Return the place that the offset at a place leads to."""
    return at + int(struct.unpack_from("<I", content, at)[0])


def _field(content: bytes, table: int, number: int) -> int:
    """Return the place of a field of a table, 0 if the table has none."""
    layout = table - struct.unpack_from("<i", content, table)[0]
    if layout < 0:
        raise IndexError
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", content, layout)[0]:
        return 0
    offset = int(struct.unpack_from("<H", content, layout + slot)[0])
    return table + offset if offset else 0
