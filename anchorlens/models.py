"""Load a model, prepare it, prove that its attention hooks act."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import ModelError
from .forward import device_of, undisturbed, vocabulary_of
from .hooked import HookedModel, pattern_name, proven, scores_name


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
            which becomes a part of the hooked model: pass a copy to go on using it by itself.
        tokenizer: Needed only with a loaded model; the one beside the weights otherwise.
        device: ``"cuda"``, ``"mps"`` or ``"cpu"``; the first that there is, by default. A loaded
            model stays where it is unless a device is named; then it is copied.
        dtype: Type of the weights; as stored, by default.

    Returns:
        A ``TransformerBridge`` whose attention hooks are proven to act. ``model.tokenizer`` adds
        a BOS exactly where the tokenizer, as loaded, adds one.

    Raises:
        ModelError: The model cannot be found or read, TransformerLens does not know its
            architecture, or its attention hooks do not act.

    Examples:
        >>> model = al.load_model(folder, device="cpu")  # or "gpt2"
    """
    from transformers import PreTrainedModel

    if isinstance(source, PreTrainedModel):
        if tokenizer is None:
            raise ModelError("a loaded model comes without a tokenizer; pass tokenizer=...")
        weights: Any = source
        if dtype is not None or device is not None:
            weights = _moved(copy.deepcopy(weights), device or weights.device, dtype)
        name = weights.config.name_or_path or type(weights).__name__
    else:
        name = str(source)
        weights, tokenizer = read_weights(name, tokenizer, dtype)
        weights = _moved(weights, device or _best_device(), dtype)
    model = _boot(name, weights, tokenizer)
    return prepare_model(model)


def prepare_model(model: HookedModel) -> HookedModel:
    """Prove that a hooked model's attention hooks act, at the cost of one tiny pass.

    In one forward and backward over three tokens it is checked for every layer that the score
    hook's edit reaches the pattern, that the pattern has the shape [batch, head, query, key] with
    entries from 0 to 1 and rows that sum to at most 1, and that a gradient arrives which equals
    the one of a factor put onto the pattern.

    Args:
        model: A ``TransformerBridge`` or ``HookedTransformer`` of your own. Nothing in it is
            changed.

    Returns:
        The same model.

    Raises:
        ModelError: Hooks do not act; the layers are named.

    Examples:
        >>> al.prepare_model(model) is model
        True
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(model, HookedModel):
        raise ModelError(
            f"expected a TransformerBridge or HookedTransformer; got {type(model).__name__}. "
            "al.load_model makes one from a name, a folder, a .gguf file or a transformers model"
        )
    _refuse_missing_hooks(model)
    faults = _probe(model)
    if faults:
        lines = "; ".join(f"layer {layer}: {fault}" for layer, fault in sorted(faults.items()))
        raise ModelError(
            f"the attention hooks of {model.cfg.model_name} do not act, so every number from them "
            f"would be wrong. {lines}. This architecture runs its attention natively and calls the "
            "hooks afterwards; load it as a HookedTransformer (transformer-lens 3.9) where that "
            "supports it"
        )
    proven.add(model)
    return model


def ensure_prepared(model: HookedModel) -> None:
    """Prove the hooks at first use; later calls cost nothing."""
    if model not in proven:
        prepare_model(model)


def _moved(weights: Any, device: str | torch.device, dtype: torch.dtype | None) -> Any:
    try:
        return weights.to(device=device, dtype=dtype)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"the model cannot be put on the device {str(device)!r}: "
            f"{str(error).partition(chr(10))[0]}; name one that this machine has (cuda, mps, cpu)"
        ) from error


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def read_weights(name: str, tokenizer: Any, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Weights and tokenizer of a hub name, a folder or a .gguf file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_gguf = name.endswith(".gguf")
    if is_gguf and not Path(name).is_file():
        raise ModelError(f"there is no file {name}")
    place, options = name, {}
    if is_gguf:
        place, options = str(Path(name).parent), {"gguf_file": Path(name).name}
        dtype = dtype or torch.float32
    try:
        # Eager attention: the fused kernels never form the pattern that the hooks need.
        weights = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype or "auto", attn_implementation="eager", **options
        )
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:  # each reader of transformers raises its own
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"{name!r} cannot be loaded as a causal language model: {reason} "
            "Where no hub can be reached, give a local folder or a .gguf file (--model)"
        ) from error
    return weights, tokenizer


def _boot(name: str, weights: Any, tokenizer: Any) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    if not weights.config.architectures:  # models made in memory and converted files do not say
        weights.config.architectures = [type(weights).__name__]
    # TransformerLens reads a tokenizer again from its folder to make it add a BOS, unless its
    # settings claim that it does; it finds out by itself what the tokenizer really adds.
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.init_kwargs = {"name_or_path": name, **tokenizer.init_kwargs, "add_bos_token": True}
    try:
        return TransformerBridge.boot_transformers(name, hf_model=weights, tokenizer=tokenizer)
    except ValueError as error:
        raise ModelError(
            f"TransformerLens does not know the architecture of {name!r} "
            f"({type(weights).__name__}): {str(error)[:200]}"
        ) from error


def _refuse_missing_hooks(model: Any) -> None:
    names = set(model.hook_dict)
    missing = [
        layer
        for layer in range(model.cfg.n_layers)
        if not {pattern_name(layer), scores_name(layer)} <= names
    ]
    if missing:
        raise ModelError(
            f"layers {missing} of {model.cfg.model_name} have no attention pattern to hook "
            "(they are state-space layers, say), and these analyses need one in every layer"
        )


def _probe(model: Any) -> dict[int, str]:
    """What is wrong with each layer's hooks; empty when all of them act."""
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    device = device_of(model)
    seen: dict[int, Tensor] = {}
    factors: dict[int, Tensor] = {}
    calls = dict.fromkeys(range(n_layers), 0)

    def hooks_of(layer: int) -> list[Any]:
        def cut_one_edge(scores: Tensor, hook: Any) -> Tensor:
            calls[layer] += 1
            cut = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            cut[2, 1] = True
            return scores.masked_fill(cut, torch.finfo(scores.dtype).min)

        def put_factor_on(pattern: Tensor, hook: Any) -> Tensor:
            seen[layer] = pattern
            if pattern.requires_grad:
                pattern.retain_grad()
            factors[layer] = torch.ones_like(pattern, requires_grad=True)
            return pattern * factors[layer]

        return [(scores_name(layer), cut_one_edge), (pattern_name(layer), put_factor_on)]

    def make_leaf(resid: Tensor, hook: Any) -> Tensor:
        return resid.detach().requires_grad_()

    tokens = torch.arange(3, device=device)[None] % vocabulary_of(model)
    hooks = [("blocks.0.hook_resid_pre", make_leaf)]
    hooks += [hook for layer in range(n_layers) for hook in hooks_of(layer)]
    with (
        undisturbed(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        model.hooks(fwd_hooks=hooks),
    ):
        logits = model(tokens, attention_mask=torch.ones_like(tokens))
        # Bounded, so that the gradient of an untrained model does not overflow.
        logits[:, -1, :16].float().log_softmax(-1)[:, 0].sum().backward()
    faults = {}
    for layer in range(n_layers):
        fault = _fault(calls[layer], seen.get(layer), factors.get(layer), n_heads)
        if fault:
            faults[layer] = fault
    return faults


def _fault(calls: int, pattern: Tensor | None, factor: Tensor | None, n_heads: int) -> str | None:
    if pattern is None or factor is None or calls != 1:
        return f"the score hook was called {calls} times in one pass, the pattern hook " + (
            "never" if pattern is None else "once"
        )
    if tuple(pattern.shape) != (1, n_heads, 3, 3):
        return f"the pattern has the shape {tuple(pattern.shape)}, not (1, {n_heads}, 3, 3)"
    values = pattern.detach().float()
    if values.min() < 0 or values.sum(-1).max() > 1.01:
        return "the pattern is negative somewhere or its rows sum to more than 1"
    if values[:, :, 2, 1].any():
        return "an edit of the scores does not reach the pattern"
    if factor.grad is None or pattern.grad is None or not factor.grad.any():
        return "an edit of the pattern does not reach the logits"
    expected = values * pattern.grad.float()
    wrong = (factor.grad.float() - expected).abs().max()
    if wrong > 0.02 * expected.abs().max():
        return "the gradient of the pattern is not the one of its effect"
    return None
