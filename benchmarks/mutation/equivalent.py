"""Mutants that compute the same as the source, judged one by one."""

from __future__ import annotations

#: By source and change: the reason.
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "src/clearhead/caches/_kv.py",
        "placed = columns.masked_fill(columns >= self._length, -1) → "
        "placed = columns.masked_fill(columns >= self._length, - 2)",
    ): "columns behind the length are written, or set to −1, before anything reads them",
    (
        "src/clearhead/caches/_base.py",
        "risky = len(held) > 1 or forced_kernels.value is not None or bool(state.observers) → "
        "risky = len(held) >= 1 or forced_kernels.value is not None or bool(state.observers)",
    ): "a cache is saved where nothing can refuse the call, which only takes time",
    (
        "src/clearhead/caches/_evicting.py",
        "if held.shape[2] == self.budget + 1: → if held.shape[2] == self.budget - 1:",
    ): "both branches keep the same tokens, in another order of the slots",
    (
        "src/clearhead/_layer/packing.py",
        "return queries * self.query + keys * self.key + pairs * self.pair → "
        "return queries * self.query + keys + self.key + pairs * self.pair",
    ): "an estimate of time, which decides between two paths with the same results",
    (
        "src/clearhead/_layer/unmodified.py",
        "return len(shape) in (2, 3) and shape[-1] == weight.shape[1] → "
        "return len(shape) in (2, 2) and shape[-1] == weight.shape[1]",
    ): "a batch takes the general path, with the same results",
    (
        "src/clearhead/masks/_coverage.py",
        "return (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0) → "
        "return (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 1)",
    ): "a row or column that is known to be seen is looked at once more",
}
