"""Load a model as a hooked model, prepare it, and verify that its attention hooks act."""

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..system.arguments import checked
from ..system.put_back import each_call_inside, put_back
from ..system.torch_state import gradient_mode, own_random_state
from .facts import known_facts, state_of
from .hooked import HookedModel, device_of, why_not_hooked
from .kinds import original_of
from .model_state import frozen_in_eval_mode, without_user_hooks
from .native_attention import implementations_of, unwrap_model
from .read_weights import device_or_map, placed, read_tokenizer, read_weights, refuse_revision
from .tiny_pass import logits_of, relative_difference, rounding_of_passes, said_by, tiny_passes
from .verify_hooks import ENCODER_DECODER, refuse_bidirectional, require_hook_points, verified_facts

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge
else:
    TransformerBridge = Any  # type checkers and editors need the class; its import takes seconds

Model = TypeVar("Model", bound=HookedModel)


# An inference_mode of the caller would make tensors that autograd rejects.
@each_call_inside(gradient_mode, True)
@checked
def load_model(
    source: Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    device_map: str | int | torch.device | Mapping[str, int | str | torch.device] | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> TransformerBridge:
    """Load a language model as a prepared, hooked model.

    Weights stay as trained: nothing is folded or centred. Code that comes with them is never run.

    Args:
        source: Name on the hub, local folder, ``.gguf`` file, or a loaded transformers model, which
            becomes a part of the hooked model, even if an error is raised later: pass a copy if you
            want to use it separately.
        tokenizer: A tokenizer, or the name or folder of one; by default the one stored with the
            weights. Required with a loaded model.
        device: ``"cuda"``, ``"mps"`` or ``"cpu"``. By default the device that accelerate gave this
            process, otherwise the first of the three that is available. A loaded model stays where
            it is, or is copied to the device that is named.
        device_map: In place of ``device``, spreads the layers over several, as in transformers:
            ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, one device, or the
            device of each module by its name. All weights stay in memory.
        dtype: Type of the weights; by default that in which they are stored.
        revision: A branch, tag or commit of a name on the hub, then called ``name@revision``.

    Returns:
        A ``TransformerBridge`` whose attention hooks were verified. ``model.tokenizer`` adds a BOS
        exactly where the tokenizer, as loaded, adds one.

    Raises:
        ModelError: The model or its tokenizer cannot be found or read, is of another kind (such as
            a PeftModel or a compiled model), needs code of its own, was made inside
            ``torch.inference_mode``, or has other weights than its configuration; a device cannot
            be used, or an argument does not fit another; or TransformerLens does not know the
            architecture, computes other logits than transformers, or its hooks cannot act.

    Examples:
        >>> model = al.load_model(folder, device="cpu")  # or "gpt2"
    """
    from transformers import PreTrainedModel

    place = device_or_map(device, device_map)
    tokenizer = read_tokenizer(tokenizer)
    if isinstance(source, PreTrainedModel):
        if revision is not None:
            refuse_revision(source)
        if tokenizer is None:
            raise ModelError("a loaded model comes without a tokenizer; pass tokenizer=...")
        weights: Any = source
        name = weights.config.name_or_path or type(weights).__name__
        _refuse_weights_elsewhere(name, weights)
        if place is not None or dtype is not None:
            weights = placed(copy.deepcopy(weights), place, dtype)
        _refuse_inference_tensors(name, weights)
    else:
        _refuse_other_sources(source)
        weights, tokenizer = read_weights(str(source), tokenizer, place, dtype, revision)
        name = f"{source}" if revision is None else f"{source}@{revision}"
    return bridge_of(name, weights, tokenizer)


@each_call_inside(gradient_mode, True)
@checked
def prepare_model(model: Model) -> Model:
    """Make a hooked model's attention hooks act, and verify it in one tiny pass.

    Afterwards edits and gradients at ``blocks.L.attn.hook_attn_scores`` and ``hook_pattern`` act in
    plain ``run_with_hooks``, also in hooks that you write, once a pass. Where a bridge would call
    the hooks too late (GPT-J, GPT-Neo, OPT and rarer architectures), the ``forward`` of the
    attention is replaced, until ``restore_model`` undoes it.

    One forward and backward over three tokens verifies for every layer that an edit of the scores
    reaches the pattern; that this has the shape [batch, head, query, key], entries from 0 to 1,
    zeros for later keys, and rows that sum to at most 1; and that its gradient is right.

    Args:
        model: A ``TransformerBridge`` or ``HookedTransformer``. Preparing it again changes nothing.

    Returns:
        The same model.

    Raises:
        ModelError: The hooks cannot be made to act; the model is as it was.

    Examples:
        >>> al.prepare_model(model) is model
        True
    """
    if any(kind.__name__ == "RemoteBridge" for kind in type(model).__mro__):  # not in 3.9
        raise ModelError(
            f"{model.cfg.model_name} is a RemoteBridge, which vLLM or inspect runs elsewhere: it "
            "gives no gradients and no attention patterns; load the same weights with al.load_model"
        )
    if reason := why_not_hooked(model):
        raise ModelError(reason)
    _refuse_weights_elsewhere(model.cfg.model_name, model)
    _refuse_inference_tensors(model.cfg.model_name, model)
    facts = known_facts.get(model)

    def keep_or_undo() -> None:
        if facts is None:
            restore_model(model)
        else:  # to prepare a model again changes no module
            known_facts[model] = facts

    with frozen_in_eval_mode(model), without_user_hooks(model):
        require_hook_points(model)
        try:
            with put_back(keep_or_undo):
                facts = verified_facts(model)
        except ModelError:
            restore_model(model)
            refuse_bidirectional(model)
            raise
    return model


@checked
def restore_model(model: Model) -> Model:
    """Undo ``prepare_model``: every module has its own ``forward`` again.

    Args:
        model: A model of TransformerLens, prepared or not; anything else is a ModelError.

    Returns:
        The same model. Functions that build hooks for it raise an error until it is prepared again.

    Examples:
        >>> al.restore_model(al.prepare_model(model)) is model
        True
        >>> model = al.prepare_model(model)
    """
    if reason := why_not_hooked(model):
        raise ModelError(reason)
    known_facts.pop(model, None)
    unwrap_model(model)
    return model


def bridge_of(name: str, weights: Any, tokenizer: Any) -> TransformerBridge:
    """The prepared bridge of weights, of which they and the tokenizer become parts."""
    refuse_encoder_decoder(name, weights.config)
    vocabulary = len(weights.get_input_embeddings().weight)
    # The expected logits are computed now, because the bridge takes the weights apart.
    longest = getattr(weights.config.get_text_config(), "max_position_embeddings", None) or 8
    tokens = torch.arange(min(8, longest), device=device_of(weights))[None] % vocabulary
    with tiny_passes(weights):
        expected = logits_of(weights, tokens) if weights.can_generate() else None
    with own_random_state([torch.get_default_device()]):  # new modules draw random weights first
        model = _boot(name, weights, tokenizer)
    if expected is not None:
        _refuse_different_logits(name, expected, model, tokens)
    return prepare_model(model)


def refuse_encoder_decoder(name: str, config: Any) -> None:
    """Raise an error if a configuration of transformers is that of an encoder-decoder."""
    # Its decoder alone (BartForCausalLM) has a configuration of the same class.
    if config.is_encoder_decoder or getattr(type(config), "is_encoder_decoder", False):
        what = "an" if config.is_encoder_decoder else "the decoder of an"
        raise ModelError(ENCODER_DECODER.format(name, what))


def _refuse_other_sources(source: Any) -> None:
    if isinstance(source, str | os.PathLike):
        return
    if hasattr(source, "peft_config"):
        cure = "pass model.merge_and_unload(); al.contexts.context_from_peft reads a saved prefix"
    elif hasattr(source, "_orig_mod"):
        cure = "pass model._orig_mod, the model before torch.compile"
    elif hasattr(source, "hook_dict"):
        cure = "it is a hooked model already: pass it to al.prepare_model"
    elif isinstance(source, nn.Module) and isinstance(getattr(source, "module", None), nn.Module):
        cure = "pass model.module, the model that it wraps"
    else:
        cure = "use AutoModelForCausalLM of transformers to load one"
    raise ModelError(
        "expected a name, a folder, a .gguf file or a transformers model; got a "
        f"{type(source).__name__}: {cure}"
    )


def ensure_prepared(model: HookedModel) -> None:
    """Prepare a model at its first use, and again if it is no longer what it was then."""
    facts = known_facts.get(model)
    if facts is None or facts.state != state_of(model):
        prepare_model(model)


def _boot(name: str, weights: Any, tokenizer: Any) -> Any:
    """A bridge; ``boot_transformers`` would patch classes of transformers, install torchvision."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformer_lens.model_bridge.sources import transformers as of_transformers

    if not weights.config.architectures:  # absent in models made in memory and in converted files
        weights.config.architectures = [type(weights).__name__]
    # TransformerLens would read the tokenizer again from its folder to make it add a BOS, unless
    # this setting is true. It then tests which tokens the tokenizer really adds.
    tokenizer.init_kwargs = {"name_or_path": name, **tokenizer.init_kwargs, "add_bos_token": True}
    config = copy.deepcopy(weights.config)
    set_as_found = implementations_of(weights)
    try:
        weights.set_attn_implementation("eager")
        architecture = of_transformers.determine_architecture_from_hf_config(config)
        options = {"hf_config": config, "tokenizer": tokenizer, "model_name": name}
        return build_bridge_from_module(weights, architecture, **options)
    except Exception as error:  # an unknown architecture, or an adapter that does not fit
        set_as_found()
        reason = said_by(error).partition(" Available architectures")[0]  # more than a hundred
        if "torchvision" in reason:
            reason += " It has to be torchvision of the same build as your torch"
        raise ModelError(
            f"TransformerLens cannot wrap {name!r} ({type(weights).__name__}): {reason}; "
            "passes that you make with transformers can go into al.caches.from_caches"
        ) from error


def _refuse_weights_elsewhere(name: str, model: Any) -> None:
    """Raise an error for weights without numbers, which may be in memory for one call at a time."""
    if any(each.is_meta for each in model.parameters()):
        raise ModelError(
            f"weights of {name} are on the device 'meta': its tensors have shapes and no numbers. "
            "If accelerate moves each when it is used, load the model so that all stay in memory: "
            'in a smaller type (dtype=torch.bfloat16), or over several devices (device_map="auto")'
        )


def _refuse_inference_tensors(name: str, model: Any) -> None:
    roots = [each for each in (model, original_of(model)) if each is not None]
    if any(each.is_inference() for root in roots for each in (*root.parameters(), *root.buffers())):
        raise ModelError(
            f"{name} was made inside torch.inference_mode(), so that no gradient can go through "
            "its tensors; make it outside, or copy it outside: copy.deepcopy(model)"
        )


def _refuse_different_logits(name: str, expected: Tensor, model: Any, tokens: Tensor) -> None:
    with tiny_passes(model):
        computed = logits_of(model, tokens)
    if not (expected.isfinite().all() and computed.isfinite().all()):
        return  # verify_hooks raises an error that names the layer
    difference = relative_difference(computed, expected)
    if not difference <= rounding_of_passes(expected.dtype):
        raise ModelError(
            f"TransformerLens makes another model of {name!r}, whose logits differ by "
            f"{difference:.2g} of the largest; try another version of transformer-lens"
        )
