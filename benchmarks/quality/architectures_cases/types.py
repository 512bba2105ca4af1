"""Which model types there are, and the class that stands for each."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, replace
from typing import Any, final

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .results import DECODER

__all__ = ["Architecture", "architectures", "generating", "models_of"]

#: A model type without a base model in `MODEL_MAPPING` is represented by the first of these mappings that has it.
MAPPINGS = (
    "MODEL",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_MULTIMODAL_LM",
    "MODEL_FOR_BACKBONE",
)


#: Those whose models generate text, in the order in which one is taken.
GENERATING = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT")


@final
@dataclass(frozen=True)
class Architecture:
    """One model type, and how it is built.

    Args:
        name: the model type; with " (decoder)" where an encoder is built as a decoder.
        model_type: as in transformers' mappings.
        class_name: the class of the model.
        decoder: whether the configuration gets ``is_decoder=True``.
    """

    name: str
    model_type: str
    class_name: str
    decoder: bool = False

    @property
    def model_class(self) -> type[PreTrainedModel]:
        found = getattr(transformers, self.class_name, None)
        return found or next(c for c in models_of(CONFIG_MAPPING[self.model_type]) if c.__name__ == self.class_name)


def generating(architecture: Architecture) -> Architecture | None:
    """The architecture with the class that generates text, if there is one."""
    mappings = [getattr(modeling_auto, f"{name}_MAPPING_NAMES") for name in GENERATING]
    names = [mapping[architecture.model_type] for mapping in mappings if architecture.model_type in mapping]
    return replace(architecture, class_name=_first(names[0])) if names else None


def architectures() -> list[Architecture]:
    """All model types of transformers' mappings that have a model, sorted by name."""
    mappings = _mappings()
    found = []
    for model_type in CONFIG_MAPPING:
        names = [mapping[model_type] for mapping in mappings if model_type in mapping]
        class_name = _first(names[0]) if names else _only_class(model_type)
        if class_name is None:
            continue
        found.append(Architecture(model_type, model_type, class_name))
        causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        if causal and names[0] != causal and "is_decoder" in CONFIG_MAPPING[model_type].__dataclass_fields__:
            found.append(Architecture(model_type + DECODER, model_type, _first(causal), decoder=True))
    return sorted(found, key=lambda architecture: architecture.name)


def _mappings() -> list[dict[str, Any]]:
    first = [f"{name}_MAPPING_NAMES" for name in MAPPINGS]
    rest = [name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES") and name.startswith("MODEL")]
    return [getattr(modeling_auto, name) for name in dict.fromkeys(first + rest)]


def _first(name: Any) -> str:
    return name if isinstance(name, str) else name[0]


def _only_class(model_type: str) -> str | None:
    """The model of a configuration that has no entry in the mappings: a part of a larger model."""
    classes = models_of(CONFIG_MAPPING[model_type])
    return classes[0].__name__ if classes else None


def models_of(config_class: type) -> list[type[PreTrainedModel]]:
    """The models of a configuration in the Python module beside that of the configuration."""
    try:
        module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return []
    return [value for value in vars(module).values() if _is_model_of(value, config_class)]


def _is_model_of(value: Any, config_class: type) -> bool:
    is_model = inspect.isclass(value) and issubclass(value, PreTrainedModel)
    return is_model and value.config_class is config_class and not value.__name__.endswith("PreTrainedModel")
