"""What can be refused before weights are loaded: device, depth, and prompts by the tokenizer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..contexts.protocol import bos_of, longest_query
from ..errors import HookError, PromptError
from ..models.hooked import refuse_longer_than
from ..models.load import refuse_encoder_decoder
from ..models.read_weights import read_model_files, refuse_device, refuse_no_file
from ..prompts.batch import PromptBatch, longest_prompt

BuildPrompts = Callable[[Any], Iterable[PromptBatch]]


def checked_tokenizer(
    model: str,
    device: str | None,
    depth: int | None,
    build_prompts: BuildPrompts,
    *,
    length: int = 0,
) -> Any:
    """The tokenizer of a model, after everything was checked that needs no weights.

    None for a .gguf file, which holds tokenizer and weights in one, and takes as long to read
    without the weights: there the checks come after loading. ``length`` is how many positions a
    trained context puts before each query.
    """
    if device is not None:
        refuse_device(device)
    if model.endswith(".gguf"):
        refuse_no_file(model)
        return None
    config, tokenizer = read_model_files(model)
    refuse_encoder_decoder(model, config)
    text_config = config.get_text_config()
    layers = getattr(text_config, "num_hidden_layers", None)
    if layers is not None:
        check_depth(depth, layers)
    context = getattr(text_config, "max_position_embeddings", None)
    batches = list(build_prompts(tokenizer))
    if context is not None:
        for batch in batches:
            refuse_longer_than(context, longest_prompt(batch))
        check_length(length, context, batches)
    return tokenizer


def check_depth(depth: int | None, layers: int) -> None:
    """Raise an error if a model has fewer layers than ``--depth``."""
    if depth is not None and depth > layers:
        raise HookError(
            f"--depth {depth} is more than the {layers} layers of the model; isolate fewer at each "
            "end"
        )


def check_length(length: int, context: int, batches: Sequence[PromptBatch]) -> None:
    """Raise an error if a query does not fit a model after ``--length`` positions."""
    longest = max(len(bos_of(batch)) + longest_query(batch) for batch in batches)
    if length + longest > context:
        raise PromptError(
            f"--length {length} is too long: the model's context is {context} tokens, and the "
            f"longest query takes {longest}; use at most --length {context - longest}"
        )
