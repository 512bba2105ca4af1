"""An attention layer: project → unpad → attend → pad → project out, for every attention module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from .._call.caching import Cache, KeyValues, Positions
from .._call.heads import merge_heads, split_heads
from .._call.rows import Rows
from .._call.spec import Results, WeightsWanted
from .._environment import Environment, autocast_off, cast_for_autocast
from ..masks._base import Mask, all_of
from ..masks._tensors import as_mask
from .packing import Costs, attend_rows, unpad
from .plan import attend_arguments
from .positions import PositionPart, apply_position, combined_mask, positions_of_keys, positions_of_queries
from .unmodified import apply_linear

__all__ = ["Form", "Forms", "Layer", "Project"]

#: (…, features) of query, key and value → (…, H·D), (…, Hkv·D), (…, Hkv·Dv); without a key the query alone.
Project = Callable[[Tensor, "Tensor | None", "Tensor | None"], "tuple[Tensor, Any, Any]"]


@dataclass(slots=True)
class Form:
    """What attention is computed of, and what is made of its output.

    Args:
        query, key, value: (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv).
        finish: of the output (B, H, L, Dv); ``None`` for nothing.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    finish: Callable[[Tensor], Tensor] | None = None


class Forms(Protocol):
    """How attention is computed of projections that are not queries, keys and values yet (latent attention)."""

    def of(self, query: Tensor, keys: Tensor, *, cached: bool, observed: bool) -> Form:
        """The form for these queries and what the projections, or the cache, gave for keys."""
        ...

    def for_cache(self, cache: Cache, query: Tensor, keys: Tensor) -> Tensor | None:
        """The queries that a cache observes; ``None`` where it observes nothing."""
        ...


@dataclass(slots=True)
class Layer:
    """One call of an attention module, whose class has translated its parts.

    Args:
        project: the input projections.
        out_proj: the output projection.
        num_heads, num_kv_heads: H and Hkv.
        scale, dropout_p, softcap, sinks: as for `attention`.
        q_norm, k_norm: of every head's query and key.
        position: applied to queries and keys after them.
        mask: the module's own.
        costs: of a token and of a pair, for leaving padding out; ``None`` never does.
        batch_first: whether memory holds (B, L, E) rather than (L, B, E). Tensors are (B, L, E) either way.
        forms: how attention is computed of the projections, where it is not of them as they are.
    """

    project: Project
    out_proj: nn.Module
    num_heads: int
    num_kv_heads: int
    scale: float | None = None
    dropout_p: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    position: PositionPart | None = None
    mask: Mask | None = None
    costs: Costs | None = None
    batch_first: bool = True
    forms: Forms | None = None

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | Tensor | None,
        environment: Environment,
        *,
        positions: Positions | None = None,
        cache: Cache | None = None,
        weights: WeightsWanted = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output (B, L, E), or (L, E) without a batch, and the weights if they are wanted.

        Args:
            query: (B, L, features), or (L, features) without a batch.
            key, value: likewise; ``None`` where a cache holds all there is.
            mask: of the call.
            environment: of the call.
            positions: of the queries, and of the keys that come with them.
            cache: takes the new keys and values, and gives all that are attended to.
            weights: which.
        """
        if positions is not None or cache is not None:
            return self._run_placed(query, key, value, mask, environment, positions, cache, weights)
        if mask is not None and weights is None:
            found = self._run_unpadded(query, key, value, mask, environment)
            if found is not None:
                return found, None
        q, k, v = self.projected(query, key, value, 0, environment)
        combined = self.mask if mask is None else as_mask(mask)
        if mask is not None and self.mask is not None:
            combined = self.mask & as_mask(mask)
        form = None if self.forms is None else self._form(q, k, False, environment)
        if form is not None:
            q, k, v = form.query, form.key, form.value
        results = attend_arguments(
            q,
            k,
            v,
            combined,
            environment,
            scale=self.scale,
            dropout_p=self.dropout_p,
            softcap=self.softcap,
            sinks=self.sinks,
            weights=weights,
        )
        return self.finished(results, form, query.dim() == 3, environment)

    def _run_placed(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | Tensor | None,
        environment: Environment,
        positions: Positions | None,
        cache: Cache | None,
        weights: WeightsWanted,
    ) -> tuple[Tensor, Tensor | None]:
        """The same at explicit positions, or with a cache."""
        known = None if cache is None else cache.get()
        places = positions_of_queries(positions, cache, query.shape[-2])
        # Where the keys stand too, in self-attention, and where a position part turns both by the same positions.
        own = places if cache is None and (key is query or self.position is not None) else None
        if known is None:
            q, k, v = self.projected(query, key, value, places, environment)
            known = KeyValues(k, v) if cache is None else cache.update(k, v, places)
        else:
            q = self._query_heads(self.project(query, None, None)[0])
            if environment.autocast:
                (q,) = cast_for_autocast(q)
        combined = combined_mask(self.mask, mask, known, places)
        form = self._form(q, known.key, cache is not None, environment)
        results = attend_arguments(
            q if form is None else form.query,
            known.key if form is None else form.key,
            known.value if form is None else form.value,
            combined,
            environment,
            scale=self.scale,
            dropout_p=self.dropout_p,
            softcap=self.softcap,
            sinks=self.sinks,
            query_positions=places,
            key_positions=positions_of_keys(known, own, self.num_heads),
            weights=weights,
        )
        found = self.finished(results, form, query.dim() == 3, environment)
        if cache is not None:
            self._observe(cache, q, known, combined, places)
        return found

    def projected(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, places: Positions, environment: Environment
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv), at their positions."""
        q, k, v = self.project(query, key, value)
        q, k, v = self._query_heads(q), self._key_heads(k), _heads(v, self.num_kv_heads)
        if self.position is not None:
            q, k = apply_position(self.position, q, k, places)
        if environment.autocast:
            q, k, v = cast_for_autocast(q, k, v)
        return q, k, v

    def finished(
        self, results: Results, form: Form | None, batched: bool, environment: Environment
    ) -> tuple[Tensor, Tensor | None]:
        """The output after the output projection, and the weights; without a batch where the inputs have none."""
        mixed, weights = results.output, results.weights  # (B, H, L, Dv)
        if form is not None and form.finish is not None:
            mixed = form.finish(mixed)
        output = self._project_out(mixed, batched, environment)
        return output, weights if weights is None or batched else weights.squeeze(0)

    def run_rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Rows,
        mask: Mask | Tensor | None,
        positions: Callable[[], Tensor],
        environment: Environment,
    ) -> Tensor:
        """Attention within rows of tokens (T, features), up to the output projection: (T, H·Dv)."""
        q, k, v = self.project(query, key, value)
        q, k, v = self._query_heads(q), self._key_heads(k), _heads(v, self.num_kv_heads)  # (1, H, T, D) …
        if self.position is not None:
            q, k = apply_position(self.position, q, k, positions())
        if environment.autocast:
            q, k, v = cast_for_autocast(q, k, v)
        with autocast_off(q) if environment.autocast else nullcontext():
            results = attend_rows(
                q,
                k,
                v,
                rows,
                mask,
                environment,
                scale=self.scale,
                dropout_p=self.dropout_p,
                softcap=self.softcap,
                sinks=self.sinks,
            )
        return results.output.squeeze(0).transpose(0, 1).flatten(1)  # (T, H·Dv)

    def _run_unpadded(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | Tensor | None,
        environment: Environment,
    ) -> Tensor | None:
        """The output of a padded batch, computed without its padding where that is faster."""
        if self.costs is None or mask is None or query.dim() != 3 or key is None or value is None:
            return None
        if self.position is not None and key.shape[1] != query.shape[1]:
            return None
        combined = all_of([self.mask, as_mask(mask)])
        if combined is None:
            return None
        unpadded = unpad(combined, query, key, self.num_heads, self.costs, environment)
        if unpadded is None or (self.position is not None and unpadded.queries is not unpadded.keys):
            return None
        tokens = unpadded.tokens(query, key, value)
        mixed = self.run_rows(*tokens, unpadded.rows, unpadded.mask, lambda: unpadded.positions, environment)

        def project_out(module: nn.Module, x: Tensor) -> Tensor:
            return apply_linear(module, x, environment)

        return unpadded.project_out(mixed, self.out_proj, project_out, batch_first=self.batch_first)

    def _query_heads(self, q: Tensor) -> Tensor:
        q = _heads(q, self.num_heads)
        return q if self.q_norm is None else self.q_norm(q)

    def _key_heads(self, k: Tensor) -> Tensor:
        k = _heads(k, self.num_kv_heads)
        return k if self.k_norm is None else self.k_norm(k)

    def _form(self, q: Tensor, keys: Tensor, cached: bool, environment: Environment) -> Form | None:
        if self.forms is None:
            return None
        return self.forms.of(q, keys, cached=cached, observed=environment.observed)

    def _project_out(self, mixed: Tensor, batched: bool, environment: Environment) -> Tensor:
        """(B, H, L, Dv) → (B, L, E), or (L, E) of the only item; in memory as the inputs."""
        if not batched:
            return apply_linear(self.out_proj, merge_heads(mixed.squeeze(0)), environment)
        if self.batch_first:
            return apply_linear(self.out_proj, mixed.transpose(1, 2).flatten(2), environment)
        merged = mixed.permute(2, 0, 1, 3).flatten(2)  # (L, B, H·Dv)
        return apply_linear(self.out_proj, merged, environment).transpose(0, 1)

    def _observe(self, cache: Cache, q: Tensor, known: KeyValues, mask: Mask | None, places: Positions) -> None:
        query = q if self.forms is None else self.forms.for_cache(cache, q, known.key)
        if query is not None:
            options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
            cache.observe(query, known, mask, places, **options)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, L, H·D), or (L, H·D) without a batch → (B or 1, H, L, D)."""
    if x.dim() == 3:
        batch, length, features = x.shape
        return x.view(batch, length, num_heads, features // num_heads).transpose(1, 2)
    return split_heads(x, num_heads)[None]
