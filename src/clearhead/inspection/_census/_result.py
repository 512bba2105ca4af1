"""`Census`: what every head of a model did, over a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..._checks import index, number, shown, text
from ..._statistics.recorded import RankedHead
from ..._version import __version__
from ...errors import ArgumentError, DTypeError, UnknownNameError
from ...plot._census_page import StrongRow, census_page
from ...plot._head_grid import plot_head_table
from ...plot._ink import colors
from ...plot._page_maker import Page
from ...plot._spoken import spoken
from . import _files
from ._files import State
from ._metrics import KINDS, Counted
from ._moments import Moments
from ._page import ROWS, kinds_of, least_of, telling
from ._tables import column_of, described, row_of, united

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUMS = ("mean", "spread", "lowest", "highest")


class Strongest(NamedTuple):
    """A text in which a metric of a head was large, and where.

    Example:
        >>> Strongest(text=4, position=7, value=0.5)
        Strongest(text=4, position=7, value=0.5)
    """

    text: int
    position: int
    value: float


@dataclass(frozen=True, eq=False)
class Census:
    """What every head of a model did over a corpus: the result of `clearhead.census`.

    Layers are names of modules in running order, as in a record. Every method that returns numbers returns a dictionary
    of them: layer → (H,), float64, and NaN for a head without a query that counts.

    Args:
        layers: layer → sums.
        counted: what was counted.
        texts: the number of texts.
        tokens: the number of tokens, without padding.
        batches: the number of batches.
        columns: other numbers per head by name, as `with_column` adds them.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 12), clearhead.MultiHeadAttention(12, 3)).eval()
        >>> found = clearhead.census(model, [torch.tensor([[1, 2, 1, 3]])])
        >>> found.count("duplicate")["1"].tolist()  # one token has an earlier double
        [1.0, 1.0, 1.0]
    """

    layers: dict[str, Moments]
    counted: Counted
    texts: int
    tokens: int
    batches: int
    columns: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics."""
        return self.counted.names

    @property
    def heads(self) -> dict[str, int]:
        """Layer → its number of heads."""
        return {layer: moments.count.shape[1] for layer, moments in self.layers.items()}

    def count(self, metric: str) -> dict[str, Tensor]:
        """The number of queries that count: of a mass, those that see such a key."""
        return self._of("count", metric)

    def mean(self, metric: str) -> dict[str, Tensor]:
        """The mean over the queries that count, or a column of this name."""
        return dict(self.columns[metric]) if text("metric", metric) in self.columns else self._of("mean", metric)

    def share(self, metric: str) -> dict[str, Tensor]:
        """The mean of a mass over all queries. It is 0 where a query sees no such key."""
        counts, every = self._of("count", metric), self._of("count", "entropy")
        return {
            layer: mean.nan_to_num() * counts[layer] / every[layer] for layer, mean in self._of("mean", metric).items()
        }

    def spread(self, metric: str) -> dict[str, Tensor]:
        """The standard deviation over the queries that count."""
        counts = self._of("count", metric)
        return {layer: (x / counts[layer]).sqrt() for layer, x in self._of("squares", metric).items()}

    def lowest(self, metric: str) -> dict[str, Tensor]:
        """The lowest value."""
        return self._of("lowest", metric)

    def highest(self, metric: str) -> dict[str, Tensor]:
        """The highest value."""
        return self._of("highest", metric)

    def strongest(self, metric: str, layer: int | str, head: int) -> list[Strongest]:
        """The texts in which the metric of a head was largest, one query of each, the strongest first.

        Texts are numbered in their order in the corpus, and positions within them, from 0.
        """
        moments, row = self.layers[self.name_of(layer)], self._row(metric)
        head = index("head", head, moments.count.shape[1])
        places = zip(
            moments.texts[row, head].tolist(),
            moments.positions[row, head].tolist(),
            moments.strongest[row, head].tolist(),
            strict=True,
        )
        return [Strongest(*place) for place in places if place[0] >= 0]

    def rank_heads(self, metric: str) -> list[RankedHead]:
        """All heads by the mean of a metric or column, the largest first. Heads without a mean are left out."""
        ranked = [
            RankedHead(layer, head, value)
            for layer, values in self.mean(metric).items()
            for head, value in enumerate(values.tolist())
            if value == value
        ]
        return sorted(ranked, key=lambda place: place.weight, reverse=True)

    def kinds(self, threshold: float | None = None) -> dict[str, list[RankedHead]]:
        """The heads of each kind: those whose mean mass is at least a threshold, the largest first.

        A kind is a mass, and a head may have several. A name says what a head attends to, not what it is for.

        Args:
            threshold: of the mean mass. Default 0.4, and 0.8 for ``window``, on which every head of a short text has
                much mass.
        """
        if threshold is not None:
            threshold = number("threshold", threshold, "a mass in [0, 1]", lambda x: 0 <= x <= 1)
        least = {kind: usual if threshold is None else threshold for kind, usual in KINDS.items()}
        return {kind: [head for head in self.rank_heads(kind) if head.weight >= least[kind]] for kind in KINDS}

    def with_column(self, name: str, values: Mapping[str, Tensor]) -> Census:
        """The same census with another number for each head, such as `clearhead.head_importance` returns.

        Args:
            name: of the column.
            values: layer → (H,). Layers that are missing have NaN.

        Raises:
            ArgumentError: for the name of a metric, or a layer that the census does not have.
            DTypeError: for anything but a dictionary of tensors.
            ShapeError: for another number of heads.
        """
        if text("name", name) in self.metrics:
            raise ArgumentError("name", expected="a name that is no metric", got=repr(name))
        column = column_of(values, self.heads, self.name_of)
        return replace(self, columns={**self.columns, name: column})

    def merged(self, *others: Census) -> Census:
        """One census of all corpora: the texts of `others` follow those of this one.

        Raises:
            ArgumentError: unless all have the same layers, heads and settings, and equal columns of one name.
            DTypeError: for anything but a census.
        """
        result = self
        for other in others:
            if not isinstance(other, Census):
                raise DTypeError("others", expected="a Census", got=shown(other))
            if other.counted != self.counted:
                raise ArgumentError("others", expected=f"the settings {self.counted}", got=str(other.counted))
            if other.heads != self.heads:
                raise ArgumentError("others", expected=f"the heads {self.heads}", got=str(other.heads))
            sums = {
                layer: moments.merged(other.layers[layer].shifted(result.texts))
                for layer, moments in result.layers.items()
            }
            counts = result.texts + other.texts, result.tokens + other.tokens, result.batches + other.batches
            result = Census(sums, self.counted, *counts, united(result.columns, other.columns))
        return result

    def save(self, path: str | Path) -> None:
        """Write the whole census to a ``.safetensors`` file, whose metadata has the settings as JSON."""
        state = State(self.layers, self.counted, self.texts, self.tokens, self.batches, self.columns)
        _files.save(state, Path(path))

    @staticmethod
    def load(path: str | Path) -> Census:
        """Read a census that `save` wrote.

        Raises:
            CheckpointError: for a file that is none.
        """
        return Census(*_files.load(Path(path)))

    def as_json(self) -> dict[str, Any]:
        """All numbers as plain objects, NaN as ``None``.

        * ``clearhead``: the version that made it.
        * ``texts``, ``tokens``, ``batches``: how many were counted; padding is no token.
        * ``special``, ``window``, ``strongest``: the settings, as for `clearhead.census`.
        * ``pairs``: a list of names, each with the ids of its queries and of its keys.
        * ``metrics``: a list of ``name``, ``meaning``, and ``counts``, the queries that count.
        * ``heads``: a list of all heads in running order. Each has ``layer`` (its number), ``module`` (the name of the
          layer), ``head``, ``kinds`` (those of `kinds` that it belongs to), ``metrics`` (by name: ``mean``,
          ``spread``, ``lowest``, ``highest``, ``count``) and ``columns`` (by name: one number).

        Returns:
            A dictionary of these fields.
        """
        numbers = {metric: {name: getattr(self, name)(metric) for name in (*_SUMS, "count")} for metric in self.metrics}
        heads = described(self.heads, numbers, self.kinds(), self.columns)
        counts = {"texts": self.texts, "tokens": self.tokens, "batches": self.batches}
        metrics = [metric._asdict() for metric in self.counted.metrics]
        return {"clearhead": __version__, **counts, **asdict(self.counted), "metrics": metrics, "heads": heads}

    def write(self, folder: str | Path) -> None:
        """Write ``index.json`` with all numbers, and one file a head with its strongest texts beside it.

        The index is that of `as_json`, and each of its heads has a ``file``. That file has the ``layer``, ``module``
        and ``head`` again, and ``strongest``: for each metric a list of ``text``, ``position`` and ``value``, as
        `strongest` returns it.
        """
        index, files = self.as_json(), {}
        for head in index["heads"]:
            place = head["layer"], head["head"]
            head["file"] = "heads/layer-{}-head-{}.json".format(*place)
            strongest = {name: [each._asdict() for each in self.strongest(name, *place)] for name in self.metrics}
            files[head["file"]] = {**{name: head[name] for name in ("layer", "module", "head")}, "strongest": strongest}
        _files.write({**files, "index.json": index}, Path(folder))

    def frame(self) -> Any:
        """A pandas table: one row a head, the columns those of the index of `write`, flat.

        Raises:
            ImportError: without pandas.
        """
        frame: Any = import_module("pandas").DataFrame
        return frame([row_of(head) for head in self.as_json()["heads"]])

    def plot_heads(self, metric: str, *, ax: Axes | None = None) -> Axes:
        """Draw the mean of a metric, or a column, as layers × heads. It needs matplotlib.

        Args:
            metric: its name. Masses have a colour scale from 0 to 1.
            ax: where to draw. Default: a new figure.
        """
        values = self.mean(metric)
        heads = [range(len(of_layer)) for of_layer in values.values()]
        low, high = (0.0, 1.0) if metric in KINDS else (None, None)
        return plot_head_table(values, metric, cmap=colors(), heads=heads, low=low, high=high, ax=ax)

    @spoken
    def page(self, *, title: str = "What the heads do", threshold: float | None = None, language: str = "en") -> Page:
        """Make one self-contained HTML page: the heads of each kind, and all heads by any metric.

        It names the texts in which a head was strongest. `clearhead heads` also shows them, with their weights.

        Args:
            title: the page's title, such as the model's name.
            threshold: as for `kinds`.
            language: of the page, ``"en"`` or ``"zh"`` (Chinese). Names of metrics stay English. Default ``"en"``.

        Raises:
            ArgumentError: for another language, and a threshold that is no mass.

        Example:
            >>> import torch, clearhead
            >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 12), clearhead.MultiHeadAttention(12, 3)).eval()
            >>> clearhead.census(model, [torch.tensor([[1, 2, 1, 3]])]).page(title="Random").text.count("Random")
            2
        """
        index = self.as_json()
        kinds = kinds_of(index, self.kinds(threshold))
        rows = {
            head: [StrongRow(metric, value, at, token) for at, token, value in self.strongest(metric, *head)[:ROWS]]
            for head, metric in telling(index, kinds).items()
        }
        return census_page(index, rows, title=text("title", title), kinds=kinds, least=least_of(threshold))

    def name_of(self, layer: int | str) -> str:
        """The name of a layer: its number in running order, or its name."""
        names = list(self.layers)
        if not isinstance(layer, str):
            return names[index("layer", layer, len(names))]
        if layer not in self.layers:
            raise UnknownNameError("layer", expected=f"one of {', '.join(map(repr, names))}", got=shown(layer))
        return layer

    def _row(self, metric: str) -> int:
        if text("metric", metric) not in self.metrics:
            raise UnknownNameError("metric", expected=f"one of {', '.join(self.metrics)}", got=shown(metric))
        return self.metrics.index(metric)

    def _of(self, sums: str, metric: str) -> dict[str, Tensor]:
        row = self._row(metric)
        found = {layer: (getattr(x, sums)[row].double(), x.count[row]) for layer, x in self.layers.items()}
        if sums == "count":
            return {layer: count for layer, (count, _) in found.items()}
        return {layer: values.masked_fill(count == 0, float("nan")) for layer, (values, count) in found.items()}

    def __str__(self) -> str:
        lines = [f"census of {len(self.layers)} layers over {self.tokens:,} tokens in {self.texts:,} texts"]
        for kind, heads in self.kinds().items():
            if heads:
                places = list(self.layers)
                shown = ", ".join(f"{places.index(x.layer)}.{x.head} ({x.weight:.2f})" for x in heads[:8])
                lines.append(f"{kind:<16} {shown}{', …' if len(heads) > 8 else ''}")
        return "\n".join(lines)

    __repr__ = __str__
