"""Valid calls of all that is public: each module registers its own."""

from __future__ import annotations

from importlib import import_module

for _kind in ("attention", "caches", "checkpoints", "inspection", "masks", "modules", "plot", "census"):
    import_module(f"tests.malformed.cases_{_kind}")
