"""Switching on and off: PyTorch's registry, ``with`` blocks, threads, forks, and what holds meanwhile."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

import clearhead
from clearhead.backend import _sdpa
from clearhead.errors import ArgumentError
from tests.backend.small_calls import compute_small_calls


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries that Clearhead's kernel computes, while it is active."""
    shapes: list[tuple[int, ...]] = []
    forward = _sdpa.KERNELS[_sdpa.FORWARD]

    def counted(keys: object, query: Tensor, *others: object, **options: object) -> object:
        shapes.append(tuple(query.shape))
        return forward(keys, query, *others, **options)

    compute_small_calls(monkeypatch)
    monkeypatch.setitem(_sdpa.KERNELS, _sdpa.FORWARD, counted)
    return shapes


def sdpa(seed: int = 0) -> Tensor:
    query, key, value = torch.randn(3, 2, 3, 7, 16, generator=torch.Generator().manual_seed(seed))
    return functional.scaled_dot_product_attention(query, key, value)


def test_import_registers_and_activates_nothing() -> None:
    script = """
import torch, clearhead
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls
print("clearhead" in list_flash_attention_impls(), current_flash_attention_impl())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "None"]


def test_it_warns_of_nothing() -> None:
    script = "import clearhead; clearhead.activate().remove()"
    run = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_pytorchs_own_functions_switch_it(computed: list[tuple[int, ...]]) -> None:
    assert "clearhead" in list_flash_attention_impls()
    sdpa()
    activate_flash_attention_impl("clearhead")
    try:
        sdpa()
        assert current_flash_attention_impl() == "clearhead"
        assert len(computed) == 1
    finally:
        restore_flash_attention_impl()
    sdpa()
    assert len(computed) == 1
    assert current_flash_attention_impl() is None


def test_a_block_restores_and_an_inner_one_leaves_the_outer_active(computed: list[tuple[int, ...]]) -> None:
    with clearhead.activate():
        with clearhead.activate():
            sdpa()
        sdpa()
        assert len(computed) == 2
    sdpa()
    assert len(computed) == 2


def test_an_error_restores() -> None:
    with pytest.raises(KeyError), clearhead.activate():
        raise KeyError
    assert current_flash_attention_impl() is None


def test_without_a_block_it_holds_until_it_is_removed(computed: list[tuple[int, ...]]) -> None:
    activation = clearhead.activate()
    sdpa()
    activation.remove()
    activation.remove()
    sdpa()
    assert len(computed) == 1


def test_what_was_restored_meanwhile_stays_restored() -> None:
    with clearhead.activate():
        restore_flash_attention_impl()
    assert current_flash_attention_impl() is None


def test_an_activation_ends_itself_alone_and_once() -> None:
    first = clearhead.activate()
    restore_flash_attention_impl()
    with clearhead.activate():
        first.remove()
        assert current_flash_attention_impl() == "clearhead"
    with pytest.raises(ArgumentError, match=r"expected an activation that holds, got one that has ended"), first:
        pass


class _Handle:
    def remove(self) -> None:
        pass


def test_another_implementation_is_not_replaced() -> None:
    register_flash_attention_impl("another", register_fn=_Handle)
    activate_flash_attention_impl("another")
    try:
        with pytest.raises(ArgumentError, match=r"no other active implementation, got 'another'.*restore_flash"):
            clearhead.activate()
        assert current_flash_attention_impl() == "another"
    finally:
        restore_flash_attention_impl()


def test_restored_within_a_forward_pass(computed: list[tuple[int, ...]]) -> None:
    class Model(nn.Module):
        def forward(self) -> Tensor:
            first = sdpa()
            activation.remove()
            return first - sdpa()

    activation = clearhead.activate()
    assert Model()().abs().max() <= 1e-5
    assert len(computed) == 1


def test_threads_and_forks_share_it(active: None) -> None:
    expected, differences = sdpa(), list[float]()

    def difference() -> None:
        differences.append(float((sdpa() - expected).abs().max()))

    threads = [threading.Thread(target=difference) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert differences == [0.0] * 5
    child = os.fork()
    if child == 0:  # no test framework in the child
        os._exit(int(not torch.equal(sdpa(), expected)))
    assert os.waitpid(child, 0)[1] == 0


def test_a_module_is_copied_while_active(active: None) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
    x = torch.randn(2, 7, 12)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_a_record_reports_each_call_once(active: None) -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(x, x, x)

    block = Block()
    with clearhead.record(block) as record:
        block(torch.randn(2, 3, 7, 16))
    assert len(record) == 1


def test_explain_says_what_is_active() -> None:
    x = torch.randn(1, 2, 3, 4)
    assert "scaled_dot_product_attention" not in str(clearhead.explain(x, x, x))
    with clearhead.activate():
        explanation = clearhead.explain(x, x, x)
        assert "PyTorch's scaled_dot_product_attention runs on Clearhead's kernel where it is faster" in str(
            explanation
        )
        assert explanation.active
