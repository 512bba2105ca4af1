"""Mutants that compute the same as the source, judged one by one."""

from __future__ import annotations

#: By source and change: the reason.
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "src/clearhead/_native/tile.h",
        "a fully masked row is not masked beside rows that see all",
    ): "`highest_first`, which the row also sets, is enough: the two numbers are only used together",
    (
        "src/clearhead/caches/_kv.py",
        "self._positions = columns.masked_fill(columns >= self._length, -1).repeat(self._key.shape[0], 1) → "
        "self._positions = columns.masked_fill(columns >= self._length, - 2).repeat(self._key.shape[0], 1)",
    ): "columns behind the length are written, or set to −1, before anything reads them",
    (
        "src/clearhead/caches/_base.py",
        "risky = len(written) > 1 or forced_kernels.value is not None or bool(state.observers) → "
        "risky = len(written) >= 1 or forced_kernels.value is not None or bool(state.observers)",
    ): "a cache is saved where nothing can refuse the call, which only takes time",
    (
        "src/clearhead/caches/_evicting.py",
        "if positions.shape[2] == self.budget + 1: → if positions.shape[2] == self.budget - 1:",
    ): "both branches keep the same tokens, in another order of the slots",
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
    (
        "src/clearhead/_call/dropout.py",
        "first_group, last_group = start // _LANES, (stop + _LANES - 1) // _LANES → first_group, last_gr"
        "oup = start // _LANES, (stop + _LANES - 0) // _LANES",
    ): "one group of random numbers more, which is cut off",
    (
        "src/clearhead/_call/call.py",
        "coverage_: Coverage | None = field(default=None, repr=False) → coverage_: Coverage "
        "| None = field(default=None, repr=True)",
    ): "what a call looks like in a debugger",
    (
        "src/clearhead/_call/call.py",
        "grid_: Grid | None = field(default=None, repr=False) → grid_: Grid | None = field(default=None, repr=True)",
    ): "what a call looks like in a debugger",
    (
        "src/clearhead/kernels/_chunked.py",
        "biases = (sums.result().to(tensor.dtype) for sums, tensor in zip(bias_gradients, call.bias_tens"
        "ors, strict=True)) → biases = (sums.result().to(tensor.dtype) for sums, tensor in zip(bias_grad"
        "ients, call.bias_tensors, strict=False))",
    ): "an assertion: both have one length",
    (
        "src/clearhead/kernels/_flex_rule.py",
        "steps = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=T"
        "rue)] → steps = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), "
        "strict=False)]",
    ): "an assertion: both have one length",
    (
        "src/clearhead/kernels/_choice.py",
        "_WORTH_THREADS = 1 << 20  # multiplications of scores that take longer on one thread than PyTor"
        "ch's kernel on several → _WORTH_THREADS = 2 << 20  # multiplications of scores that take longer"
        " on one thread than PyTorch's kernel on several",
    ): "chooses between two kernels with the same results, in an extension without OpenMP",
    (
        "src/clearhead/kernels/_blocks.py",
        "scores.masked_fill_(empty, 0)  # any finite number: softmax of −∞ alone would be NaN → scores.m"
        "asked_fill_(empty, 1)  # any finite number: softmax of −∞ alone would be NaN",
    ): "any finite number",
    (
        "src/clearhead/kernels/_sdpa.py",
        'return share if share <= (_CPU_SHARE if grid.device.type == "cpu" else _OTHER_SHARE) else None '
        '→ return share if share <= (_CPU_SHARE if not grid.device.type == "cpu" else _OTHER_SHARE) else'
        " None",
    ): "chooses between two ways with the same results",
    (
        "src/clearhead/_call/call.py",
        "zeroed_: Call | None = field(default=None, init=False, repr=False) → zeroed_: Atten"
        "tionCall | None = field(default=None, init=False, repr=True)",
    ): "the repr of a private field",
    (
        "src/clearhead/kernels/_saved_by_pytorch.py",
        "if x.stride() == strides and not x.is_neg(): → if x.stride() == strides and  x.is_neg():",
    ): "a copy of what needs none, with the same numbers",
    (
        "src/clearhead/_layer/linear.py",
        "if wanted and environment.gradients: → if wanted or environment.gradients:",
    ): "without gradients the function computes the same",
    (
        "src/clearhead/kernels/_native_support.py",
        "items, *matrix = biases[0].shape → items, *matrix = biases[ -1].shape",
    ): "there is exactly one",
    (
        "src/clearhead/kernels/_native_operator.py",
        'by_name: dict[str, Tensor] = dict(zip(("query", "key", "value"), gradients, strict=True)) → '
        'by_name: dict[str, Tensor] = dict(zip(("query", "key", "value"), gradients, strict=False))',
    ): "an assertion: both have one length",
    (
        "src/clearhead/kernels/_native_plan.py",
        "self._gradients = tuple(zip(shapes, gradients, strict=True)) → self._gradients = tuple(zip(s"
        "hapes, gradients))",
    ): "an assertion: both have one length",
    (
        "src/clearhead/backend/_varlen.py",
        "enable_gqa: bool = False, → enable_gqa: bool = True,",
    ): "nothing reads it: heads are grouped by their numbers",
}
