"""Compact numbers: quantised, split into byte planes, deflated, in base64."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


class Encoding(NamedTuple):
    """A rule that makes an integer of a number x; `page_data.js` has the inverse.

    Args:
        law: ``"even"`` is x · levels + zero. ``"root"`` is sign(x) · √|x| · levels + zero. It is finer near 0.
        width: bytes per integer. Larger numbers become the largest integer.
        levels: integers per unit.
        zero: the integer of 0. Smaller integers are negative numbers.
    """

    law: Literal["even", "root"]
    width: int
    levels: int
    zero: int = 0


INDEX = Encoding("even", 4, 1, 1)  # −1 is 0
BYTES = Encoding("even", 1, 1)


class Packer:
    """Collects arrays into one deflated stream.

    Each number is written with its lowest bytes first, all lowest bytes of an array together, then the next: bytes
    that resemble each other stand side by side.

    Example:
        >>> packer = Packer()
        >>> packer.add(torch.tensor([0.25, 1.0]), Encoding("even", 2, 10_000))
        ['even', 2, 10000, 0, 0, 2]
        >>> packer.add(torch.tensor([7, -1]), INDEX)
        ['even', 4, 1, 1, 4, 2]
    """

    def __init__(self) -> None:
        # As small as level 9 for such bytes, in a fifth of the time.
        self._deflate = zlib.compressobj(6, strategy=zlib.Z_FILTERED)
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, values: Tensor, encoding: Encoding) -> list[Any]:
        """Append an array; returns its encoding, first byte and count."""
        law, width, levels, zero = encoding
        exact = values.to(torch.float64).flatten().cpu()
        if law == "root":
            exact = exact.sign() * exact.abs().sqrt()
        numbers = (exact * levels + zero).round().clamp(0, 256**width - 1).to(torch.int64)
        place: list[Any] = [*encoding, self._size, numbers.numel()]
        planes = torch.stack([(numbers >> (8 * byte)) & 255 for byte in range(width)]).to(torch.uint8)
        self._parts.append(self._deflate.compress(planes.numpy().tobytes()))
        self._size += planes.numel()
        return place

    def add_json(self, data: Any) -> list[int]:
        """Append data as JSON; returns its first byte and how many there are."""
        text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")
        place = [self._size, len(text)]
        self._parts.append(self._deflate.compress(text))
        self._size += len(text)
        return place

    def finish(self) -> str:
        """The stream in base64."""
        return base64.b64encode(b"".join([*self._parts, self._deflate.flush()])).decode("ascii")
