"""The cost of encoding and decoding gradients on a device, as a line fitted to measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from laconic.errors import UsageError, one_line
from laconic.workload import strict_json
from laconic.workload.limits import LONGEST_S, check_name, check_time

_LONGEST_BYTE_S = 1e-3
"""A kilobyte that takes a second is a typing error."""
_TIMES = ("encode_startup_s", "encode_byte_s", "decode_startup_s", "decode_byte_s")


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """The time of one compressor for a bucket of M bytes, before compression.

    encode = encode_startup_s + encode_byte_s M,   decode = decode_startup_s + decode_byte_s M

    decode is the time of one payload: a rank that gathers the payloads of n ranks decodes n of them.
    """

    compressor: str
    """As strategies spell it: "int8", "topk(density=0.01) + error_feedback"."""
    encode_startup_s: float
    encode_byte_s: float
    decode_startup_s: float
    decode_byte_s: float
    source: str
    """A sentence that says on which device and how it was measured."""

    def __post_init__(self) -> None:
        check_name(self.compressor, "a codec's compressor")
        where = f'codec "{one_line(self.compressor, 80)}"'
        for name in _TIMES:
            most = _LONGEST_BYTE_S if name.endswith("byte_s") else LONGEST_S
            check_time(getattr(self, name), f"{where}: {name}", most=most)
        if not isinstance(self.source, str) or not self.source.strip():
            raise UsageError(f"{where}: source is empty. Say in a sentence on which device it was measured.")

    def encode_s(self, nbytes: float) -> float:
        """Seconds to encode a bucket of so many bytes."""
        return self.encode_startup_s + self.encode_byte_s * nbytes

    def decode_s(self, nbytes: float) -> float:
        """Seconds to decode one payload of such a bucket."""
        return self.decode_startup_s + self.decode_byte_s * nbytes

    def to_table(self) -> dict[str, str | float]:
        """As a workload file has it."""
        return asdict(self)


def read_codec(value: object, where: str) -> CodecCost:
    """A CodecCost from a parsed document; `where` names its place in errors."""
    table = strict_json.read_object(value, where, required=("compressor", *_TIMES, "source"))
    encode_startup_s, encode_byte_s, decode_startup_s, decode_byte_s = (
        strict_json.read_seconds(table[name], f"{where}.{name}") for name in _TIMES
    )
    return CodecCost(
        compressor=strict_json.read_text(table["compressor"], f"{where}.compressor"),
        encode_startup_s=encode_startup_s,
        encode_byte_s=encode_byte_s,
        decode_startup_s=decode_startup_s,
        decode_byte_s=decode_byte_s,
        source=strict_json.read_text(table["source"], f"{where}.source"),
    )
