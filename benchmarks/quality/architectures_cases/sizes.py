"""Sizes that configurations and inputs share."""

from __future__ import annotations

__all__ = ["BATCH", "FIRST_SPECIAL", "IMAGE", "LENGTH", "TARGET", "VOCABULARY"]

BATCH = 3
#: Tokens of a text, and of a decoder's text beside it.
LENGTH, TARGET = 11, 7
VOCABULARY = 99
#: Input ids are drawn below this one; special tokens that have to be moved lie above.
FIRST_SPECIAL = 70
IMAGE = 32
