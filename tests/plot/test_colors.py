"""The colours of weights: one scale everywhere, in order for every kind of sight."""

from __future__ import annotations

import re
from importlib import resources

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from clearhead.plot._ink import CHANGES, RAMP, shade, weight_bar

# How linear RGB looks with one kind of cone missing: Machado, Oliveira and Fernandes 2009, severity 1.
SIGHTS = {
    "all cones": torch.eye(3).tolist(),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def page_ramp(name: str) -> list[str]:
    script = resources.files("clearhead.plot").joinpath("page_color.js").read_text(encoding="utf-8")
    [colors] = re.findall(rf"const {name} = \[(.*?)\];", script)
    return re.findall(r"#[0-9a-f]{6}", colors)


def lab(colors: list[str], sight: str) -> Tensor:
    """CIE L*a*b* (D65), as seen."""
    values = torch.tensor([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in colors])
    linear = torch.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    seen = (linear @ torch.tensor(SIGHTS[sight]).T).clamp(0, 1)
    to_xyz = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = seen @ to_xyz.T / torch.tensor([0.9505, 1.0, 1.089])
    f = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], -1)


@pytest.mark.parametrize(("name", "ramp"), [("LIGHT", RAMP), ("LIGHT_CHANGES", CHANGES)])
def test_page_and_pictures_share_their_scales(name: str, ramp: tuple[str, ...]) -> None:
    assert page_ramp(name) == list(ramp)


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize(
    ("ramp", "direction", "first", "range_of_lightness"),
    [("LIGHT", -1, 0, 75), ("DARK", 1, 0, 75), ("LIGHT_CHANGES", -1, 4, 60), ("DARK_CHANGES", 1, 4, 60)],
)
def test_more_is_always_more_contrast(
    sight: str, ramp: str, direction: int, first: int, range_of_lightness: float
) -> None:
    """Of weights from the first colour, of differences from the middle one to both sides."""
    colors = page_ramp(ramp)
    for side in (colors[first:], colors[first::-1]) if first else (colors,):
        steps = lab(side, sight)[:, 0].diff() * direction
        assert steps.min() > 3
        assert steps.sum() > range_of_lightness


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("ramp", ["LIGHT_CHANGES", "DARK_CHANGES"])
def test_less_and_more_never_look_alike(sight: str, ramp: str) -> None:
    colors = lab(page_ramp(ramp), sight)
    for step in range(1, 5):
        assert (colors[4 + step] - colors[4 - step])[1:].norm() > 15, "hues differ beyond lightness"


@pytest.mark.parametrize(("largest", "last"), [(0.15, "0.2"), (0.2, "≥ 0.2"), (0.7, "≥ 0.2")])
def test_a_printed_scale_says_when_weights_exceed_it(largest: float, last: str) -> None:
    figure = Figure()
    axes = figure.subplots()
    image = axes.imshow(shade(torch.tensor([[0.0, largest]]), 0.2), vmin=0, vmax=1)
    bar = weight_bar(figure, image, end=0.2, caption="weight", ax=axes)
    assert [label.get_text() for label in bar.ax.get_yticklabels()][-1] == last
