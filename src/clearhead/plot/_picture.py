"""Pictures in the form of a vision model's input, read from files and processed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._checks import FLOATS, shown, strided, with_values
from ..errors import ArgumentError, DTypeError, ShapeError, shape_text

#: Larger pictures are refused: they would take gigabytes once decoded.
MOST_PIXELS = 50_000_000


def open_picture(path: str | Path) -> Any:
    """Read a picture of at most 50 million pixels from a file, upright and in RGB, as Pillow's."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    name = shown(str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of very large ones, which are refused below
            with Image.open(path) as image:
                if image.width * image.height > MOST_PIXELS:
                    got = f"{name} of {image.width} × {image.height}"
                    raise ArgumentError("image", expected=_expected(), got=got, fix="Make it smaller.")
                return ImageOps.exif_transpose(image).convert("RGB")
    except ArgumentError:
        raise
    except UnidentifiedImageError as error:
        raise ArgumentError("image", expected=_expected(), got=f"{name}, which is none") from error
    except Image.DecompressionBombError as error:
        raise ArgumentError("image", expected=_expected(), got=f"{name}, which is larger") from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:  # broken files raise any of these
        reason = getattr(error, "strerror", None) or f"damaged ({type(error).__name__})"
        raise ArgumentError("image", expected=_expected(), got=f"{name}: {reason}") from error


def as_picture(image: Any) -> Tensor:
    """Take a picture however it was given: (3, height, width), uint8.

    Args:
        image: a path, a picture of Pillow, or numbers (h, w), (h, w, 3) or (3, h, w): uint8, or floats in [0, 1]; other
            floats, such as a processor's, are stretched to that.
    """
    if isinstance(image, (str, os.PathLike)):
        image = open_picture(Path(image))
    elif hasattr(image, "convert") and hasattr(image, "size") and not isinstance(image, Tensor):
        image = image.convert("RGB")
    if isinstance(image, Tensor) and image.dim() == 4 and image.shape[0] == 1:
        image = image[0]
    pixels = torch.as_tensor(pixels_of(image).copy())
    if pixels.dim() == 2:
        pixels = pixels[..., None].expand(-1, -1, 3)
    pixels = pixels[..., :3]
    if pixels.is_floating_point():
        pixels = (pixels * 255).round()
    return pixels.clamp(0, 255).to(torch.uint8).permute(2, 0, 1).contiguous()


def seen_picture(image: Any, size: tuple[int, int], processor: Any) -> Tensor:
    """A picture as the model received it, (3, height, width), uint8.

    `image` is as for `as_picture`. `size` is the height and width of the model's input, and `processor` made it:
    transformers' image processor, or a function. Without a processor the picture has that size.
    """
    if processor is None:
        pixels = as_picture(image)
        fix = "Give processor=, the one that made the model's input: it knows what was resized and cut away."
    else:
        pixels = as_picture(_processed(image, processor))
        fix = "It is not the one that made the model's input."
    if tuple(pixels.shape[1:]) != size:
        what = "image" if processor is None else "processor"
        wanted = f"a picture of {size[1]} × {size[0]} pixels, the size of the model's input"
        raise ShapeError(what, expected=wanted, got=f"one of {pixels.shape[2]} × {pixels.shape[1]}", fix=fix)
    return pixels


def _processed(image: Any, processor: Any) -> Any:
    if isinstance(image, (str, os.PathLike)):
        image = open_picture(Path(image))
    if not callable(processor):
        expected = "an image processor of transformers, or a function"
        raise DTypeError("processor", expected=expected, got=shown(processor))
    of_images: Any = getattr(processor, "image_processor", processor)  # of a processor of texts and pictures
    if hasattr(of_images, "val_transforms"):  # timm's
        for transform in of_images.val_transforms.transforms:
            image = image if type(transform).__name__ == "Normalize" else transform(image)
        return image
    if not hasattr(of_images, "preprocess"):
        try:
            return of_images(image)
        except Exception as error:
            expected = "a function that takes the image"
            raise ArgumentError("processor", expected=expected, got=f"one that raises {error!r}") from error
    return of_images(images=image, return_tensors="pt", do_rescale=False, do_normalize=False)["pixel_values"][0]


def pixels_of(image: Any) -> Any:
    """(h, w) or (h, w, channels), from a tensor, an array or a PIL image; floats outside [0, 1] are stretched."""
    import numpy

    expected = "a picture of numbers, (height, width, 3)"
    if isinstance(image, Tensor):
        image = with_values("image", strided("image", image, expected)).detach().cpu()
        image = image.float() if image.dtype in FLOATS else image
    try:
        pixels = numpy.asarray(image)
    except (TypeError, ValueError, RuntimeError):
        raise DTypeError("image", expected=expected, got=shown(image)) from None
    if pixels.dtype.kind not in "fiub" or pixels.size == 0:
        raise DTypeError("image", expected=expected, got=f"{pixels.dtype} {shape_text(pixels.shape)}")
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise ShapeError("image", expected="(height, width, 3)", got=shape_text(pixels.shape))
    if not numpy.isfinite(pixels).all():
        raise ArgumentError("image", expected="finite numbers", got="inf or NaN among them")
    if pixels.dtype.kind == "f" and (pixels.min() < 0 or pixels.max() > 1):
        pixels = (pixels - pixels.min()) / max(float(pixels.max() - pixels.min()), 1e-12)
    return pixels


def _expected() -> str:
    return f"a picture of at most {MOST_PIXELS // 1_000_000} million pixels"
