"""Compact numbers: quantised, split into byte planes, deflated, in base64."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Encoding = Literal[
    "units",
    "roots6",
    "roots8",
    "roots16",
    "thousandths",
    "index",
    "signed",
    "signed_roots8",
    "signed_thousandths",
    "bytes",
]

#: Name → (bytes per number, number to integer). `page_data.js` has the inverses.
#: units: weights in ten-thousandths. roots: numbers in [0, 1], finer near 0. index: −1 is the largest integer.
#: signed: differences of the same, in [−1, 1] or ± 32.767.
ENCODINGS: dict[Encoding, tuple[int, Callable[[Tensor], Tensor]]] = {
    "units": (2, lambda x: x.clamp(0, 1) * 10_000),
    "roots6": (1, lambda x: x.clamp(0, 1).sqrt() * 63),
    "roots8": (1, lambda x: x.clamp(0, 1).sqrt() * 255),
    "roots16": (2, lambda x: x.clamp(0, 1).sqrt() * 65_535),
    "thousandths": (2, lambda x: x.clamp(0, 65.535) * 1000),
    "signed": (2, lambda x: x.clamp(-1, 1) * 32_767 + 32_767),
    "signed_roots8": (1, lambda x: x.clamp(-1, 1).abs().sqrt() * x.sign() * 127 + 127),
    "signed_thousandths": (2, lambda x: x.clamp(-32.767, 32.767) * 1000 + 32_767),
    "bytes": (1, lambda x: x),
    "index": (4, lambda x: torch.where(x < 0, 2**32 - 1, x)),
}


class Packer:
    """Collects arrays into one deflated stream.

    Each number is written with its lowest bytes first, all lowest bytes of an array together, then the next: bytes
    that resemble each other stand side by side.

    Example:
        >>> packer = Packer()
        >>> packer.add(torch.tensor([0.25, 1.0]), "units")
        ['units', 0, 2]
        >>> packer.add(torch.tensor([7, -1]), "index")
        ['index', 4, 2]
    """

    def __init__(self) -> None:
        # As small as level 9 for such bytes, in a fifth of the time.
        self._deflate = zlib.compressobj(6, strategy=zlib.Z_FILTERED)
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, values: Tensor, encoding: Encoding) -> list[Any]:
        """Append an array; returns what finds it again: encoding, first byte and count."""
        width, convert = ENCODINGS[encoding]
        exact = values.to(torch.float64 if values.is_floating_point() else torch.int64)
        numbers = convert(exact).round().to(torch.int64).flatten().cpu()
        place: list[Any] = [encoding, self._size, numbers.numel()]
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
