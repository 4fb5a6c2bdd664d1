"""One row of the matrix of architectures: how its tiny random model is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.hooked_transformers import CONVERTED
from tests.support.tiny_models import randomize

LINE = ".".join(version("transformer-lens").split(".")[:2])

# Options of all configurations, by their most common names. A configuration ignores the others.
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Row:
    name: str
    special: str  # how its attention differs from others
    options: Mapping[str, Any]
    # The standard deviation of every parameter: attention is neither near uniform nor near one-hot.
    scale: float = 0.25
    # Why there is no right model, by TransformerLens line or kind of model: loading must fail.
    refused: Mapping[str, str] = field(default_factory=dict)
    # Why TransformerLens makes a wrong model of a kind, which the package cannot verify. The test
    # expects wrong numbers, so it fails when TransformerLens fixes them.
    wrong: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Architecture(Row):
    """One of transformers, whose configuration class there is ``config``."""

    config: str

    @property
    def model_class(self) -> str:
        """The name of the transformers class of the model."""
        return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[getattr(transformers, self.config).model_type])

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of model that this line of TransformerLens makes of it."""
        converted = LINE.startswith("3.") and self.model_class in CONVERTED
        converted &= self.options.get("do_layer_norm_before", True)  # else there is no final norm
        return ("bridge", "processed") + ("HookedTransformer",) * converted

    def build(self, vocab_size: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        """Return the model, with the same weights at every call; ``changes`` replace options."""
        options = {**self.options, **changes, "vocab_size": vocab_size}
        config = getattr(transformers, self.config)(**options)
        for name, value in vars(config).items():
            if ("drop" in name or name.endswith("_pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        # Fused experts do not support float64.
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        randomize(model, scale=self.scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # a buffer, but learned
                buffer.copy_(torch.linspace(-0.2, 0.2, buffer.numel()))
        return model.to(dtype)


def row(
    name: str, special: str, config: str, *shared: Mapping[str, Any], **options: Any
) -> Architecture:
    """Return a row, in which later options replace earlier ones; some are of the row itself."""
    merged = dict(COMMON)
    for more in (*shared, options):
        merged |= more
    of_row = {key: merged.pop(key) for key in ("scale", "refused", "wrong") if key in merged}
    return Architecture(name, special, merged, config=config, **of_row)
