"""Load a model, prepare it, prove that its attention hooks act."""

import copy
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from .hooked import HookedModel, Operands, device_of, pattern_name, proven, scores_name
from .model_state import undisturbed, without_user_hooks
from .native_attention import (
    connect_attention,
    connect_operands,
    disconnect,
    form_patterns,
    restore,
)
from .verify import attends_to_later, n_tokens_of, probe
from .weights import best_device, moved, read_weights, refuse_device

_ENCODER_DECODER = (
    "{} is an encoder-decoder; these analyses are of left-to-right language models, whose label "
    "words stand in the same prompt as the query"
)
_BIDIRECTIONAL = (
    "{} is no left-to-right language model, but bidirectional: its tokens attend to later ones"
)


def load_model(
    source: Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Load a language model as a prepared, hooked model.

    Weights stay as trained: nothing is folded or centred.

    Args:
        source: Name on the hub, local folder, ``.gguf`` file, or a loaded transformers model,
            which becomes a part of the hooked model, also of one that is then refused: pass a copy
            to go on using it by itself.
        tokenizer: Needed only with a loaded model; the one beside the weights otherwise.
        device: ``"cuda"``, ``"mps"`` or ``"cpu"``; the first that there is, by default, or the
            process's own where accelerate made its state. A loaded model stays where it is unless
            a device is named; then it is copied.
        dtype: Type of the weights; as stored, by default.

    Returns:
        A ``TransformerBridge`` whose attention hooks are proven to act. ``model.tokenizer`` adds
        a BOS exactly where the tokenizer, as loaded, adds one.

    Raises:
        ModelError: The model cannot be found or read, its weights lack tensors or have them in
            another shape, the device cannot be used, TransformerLens does not know the architecture
            or computes other logits than transformers, or its attention hooks cannot be made to
            act.

    Examples:
        >>> model = al.load_model(folder, device="cpu")  # or "gpt2"
    """
    from transformers import PreTrainedModel

    if isinstance(source, PreTrainedModel):
        if tokenizer is None:
            raise ModelError("a loaded model comes without a tokenizer; pass tokenizer=...")
        weights: Any = source
        refuse_device(device or weights.device)
        if dtype is not None or device is not None:
            weights = moved(copy.deepcopy(weights), device or weights.device, dtype)
        name = weights.config.name_or_path or type(weights).__name__
    else:
        name, device = str(source), device or best_device()
        refuse_device(device)
        weights, tokenizer = read_weights(name, tokenizer, dtype)
        weights = moved(weights, device, dtype)
    if weights.config.is_encoder_decoder:
        raise ModelError(_ENCODER_DECODER.format(name))
    vocabulary = len(weights.get_input_embeddings().weight)
    # Before the bridge takes the weights apart.
    longest = getattr(weights.config.get_text_config(), "max_position_embeddings", None) or 8
    tokens = torch.arange(min(8, longest), device=device_of(weights))[None] % vocabulary
    expected = _few_logits(weights, tokens) if weights.can_generate() else None
    with torch.random.fork_rng(devices=[]):  # modules are made with weights that are drawn first
        model = _boot(name, weights, tokenizer)
    if expected is not None:
        _refuse_another(name, expected, _few_logits(model, tokens))
    return prepare_model(model)


def prepare_model(model: HookedModel) -> HookedModel:
    """Make a hooked model's attention hooks act, and prove it in one tiny pass.

    After it, edits and gradients at ``blocks.L.attn.hook_attn_scores`` and ``hook_pattern`` act in
    plain ``run_with_hooks``, your own hooks included, each called once a pass. Where a
    ``TransformerBridge`` runs the attention of transformers and would call the hooks too late
    (GPT-J, GPT-Neo, OPT and rarer ones), that module's ``forward`` is stood in for; nothing else in
    the model is changed, and :func:`restore_model` undoes it.

    In one forward and backward over three tokens it is checked for every layer that the score
    hook's edit reaches the pattern, that the pattern has the shape [batch, head, query, key] with
    entries from 0 to 1, none for later keys, and rows that sum to at most 1, and that a gradient
    arrives which equals the one of a factor put onto the pattern.

    Args:
        model: A ``TransformerBridge`` or ``HookedTransformer`` of your own. Preparing it again
            changes nothing.

    Returns:
        The same model.

    Raises:
        ModelError: The hooks cannot be made to act; the layers are named, and the model is as it
            was.

    Examples:
        >>> al.prepare_model(model) is model
        True
    """
    if any(kind.__name__ == "RemoteBridge" for kind in type(model).__mro__):  # not in 3.9
        raise ModelError(
            f"{model.cfg.model_name} is a RemoteBridge, which vLLM or inspect runs elsewhere: it "
            "gives no gradients and no attention patterns; load the same weights with al.load_model"
        )
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "hook_dict"):
        got = type(model).__name__
        if got in ("TransformerBridge", "HookedTransformer"):
            got = "one that is not fully built, so that it has no hook points"
        raise ModelError(
            f"expected a TransformerBridge or HookedTransformer; got {got}. "
            "al.load_model makes one from a name, a folder, a .gguf file or a transformers model"
        )
    with undisturbed(model), without_user_hooks(model):
        _refuse_missing_hooks(model)
        try:
            proven[model] = _connected(model)
        except ModelError as error:
            restore_model(model)
            if attends_to_later(model):
                raise ModelError(_BIDIRECTIONAL.format(model.cfg.model_name)) from error
            raise
        except BaseException:
            restore_model(model)
            raise
    return model


def restore_model(model: HookedModel) -> HookedModel:
    """Undo :func:`prepare_model`: every module's own ``forward`` is back.

    Args:
        model: A model, prepared or not.

    Returns:
        The same model; hook builders refuse it until it is prepared again.

    Examples:
        >>> al.restore_model(al.prepare_model(model)) is model
        True
        >>> model = al.prepare_model(model)
    """
    proven.pop(model, None)
    restore(model)
    return model


def ensure_prepared(model: HookedModel) -> None:
    """Prove the hooks at first use; later calls cost nothing."""
    if model not in proven:
        prepare_model(model)


def _boot(name: str, weights: Any, tokenizer: Any) -> Any:
    """The bridge that ``TransformerBridge.boot_transformers`` makes of loaded weights.

    By another function, because that one installs torchvision, and with it another torch, where a
    model of images lacks it, and patches classes of transformers.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformer_lens.model_bridge.sources.transformers import (
        determine_architecture_from_hf_config,
    )

    if not weights.config.architectures:  # models made in memory and converted files do not say
        weights.config.architectures = [type(weights).__name__]
    # TransformerLens reads a tokenizer again from its folder to make it add a BOS, unless its
    # settings claim that it does; it finds out by itself what the tokenizer really adds.
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.init_kwargs = {"name_or_path": name, **tokenizer.init_kwargs, "add_bos_token": True}
    config = copy.deepcopy(weights.config)
    try:
        weights.set_attn_implementation("eager")
        return build_bridge_from_module(
            weights,
            determine_architecture_from_hf_config(config),
            hf_config=config,
            tokenizer=tokenizer,
            model_name=name,
        )
    except Exception as error:  # an unknown architecture, or one that its adapter cannot take
        raise ModelError(
            f"TransformerLens cannot wrap {name!r} ({type(weights).__name__}): {str(error)[:200]}"
        ) from error


def _few_logits(model: Any, tokens: Tensor) -> Tensor:
    with undisturbed(model), without_user_hooks(model), torch.no_grad():
        try:
            outputs = model(tokens, attention_mask=torch.ones_like(tokens))
        except RuntimeError as error:  # XGLM in float64
            dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
            raise ModelError(
                f"{type(model).__name__} cannot run in {dtype}: {str(error)[:200]}; try another "
                "type (--dtype float32, in Python dtype=torch.float32)"
            ) from error
    logits: Tensor = getattr(outputs, "logits", outputs)
    return logits


def _refuse_another(name: str, expected: Tensor, found: Tensor) -> None:
    """Refuse a bridge that does not compute the model that it was made of."""
    if not (expected.isfinite().all() and found.isfinite().all()):
        return  # the probe names the layer
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= max(1e-3, 8 * torch.finfo(expected.dtype).eps):
        raise ModelError(
            f"TransformerLens makes another model of {name!r}: its logits are off by "
            f"{difference:.2g} of the largest. Its adapter does not fit this model; try another "
            "version of transformer-lens"
        )


def _refuse_missing_hooks(model: Any) -> None:
    name, names = model.cfg.model_name, set(model.hook_dict)
    if any(point.startswith(("encoder", "decoder")) for point in names):
        raise ModelError(_ENCODER_DECODER.format(name))
    original = getattr(model, "original_model", None)
    generates = getattr(original, "can_generate", None)
    if generates is not None and not generates():
        if isinstance(model, HookedModel) and attends_to_later(model):
            raise ModelError(_BIDIRECTIONAL.format(name))
        raise ModelError(f"{name} is no left-to-right language model: it does not generate text")
    if not isinstance(model, HookedModel):
        raise ModelError(f"{name} embeds no tokens; these analyses are of language models")
    # A model of TransformerLens itself is what its settings say; a bridge over BERT is not.
    if original is None and getattr(model.cfg, "attention_dir", None) == "bidirectional":
        raise ModelError(_BIDIRECTIONAL.format(name))
    if not model.cfg.n_layers:
        raise ModelError(f"{name} has no layers, and these analyses are of attention in layers")
    if model.cfg.n_ctx < n_tokens_of(model):
        raise ModelError(
            f"the context of {name} is {model.cfg.n_ctx} tokens, and the check of its hooks takes "
            f"{n_tokens_of(model)}; make the model with a longer one"
        )
    if device_of(model).type == "meta":
        raise ModelError(f"{name} is on the device 'meta', whose tensors have no numbers")
    missing = [
        layer
        for layer in range(model.cfg.n_layers)
        if not {pattern_name(layer), scores_name(layer)} <= names
    ]
    if missing:
        raise ModelError(
            f"layers {missing} of {name} have no attention pattern to hook (they are state-space "
            "layers, say), and these analyses need one in every layer"
        )


def _connected(model: Any) -> tuple[Operands | None, ...]:
    """Tap what needs it and prove the hooks; each layer's queries and keys."""
    if any([connect_attention(block.attn) for block in model.blocks]):
        form_patterns(model)
    faults, operands = probe(model)
    silent = [layer for layer, found in enumerate(operands) if found is None]
    tried = [layer for layer in silent if connect_operands(model.blocks[layer].attn)]
    if tried:
        faults, operands = probe(model)
    for layer in tried:
        if operands[layer] is None:
            disconnect(model.blocks[layer].attn)
    if faults:
        reasons = "; ".join(
            f"layers {[layer for layer, fault in faults.items() if fault == one]}: {one}"
            for one in dict.fromkeys(faults.values())
        )
        raise ModelError(
            f"the attention of {model.cfg.model_name} cannot be hooked, so that every number from "
            f"it would be wrong. {reasons}"
        )
    return operands
