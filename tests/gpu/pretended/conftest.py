"""These tests run where PyTorch has the pretended device: `tests/gpu/test_pretended.py` starts them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "PRETENDED_CAPABILITY" in os.environ else ["test_*.py"]
