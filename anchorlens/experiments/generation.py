"""A text that the model writes, and where each of its tokens comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from reprlib import repr as shorten
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import HookError, ModelError, PromptError
from ..metrics.question import HooksOfBatch
from ..metrics.weights import Weight, refuse_values, saliency
from ..models.batch_hooks import WholeHook, in_longer_text
from ..models.facts import facts_of
from ..models.head import head_in_float32
from ..models.hooked import Hook, HookedModel, check_fits, device_of, devices_of_layers
from ..models.load import ensure_prepared
from ..models.media_tokens import refuse_media_tokens
from ..models.model_state import added_hooks, frozen_in_eval_mode
from ..models.rotary import refuse_another_rotation
from ..printable import printable
from ..prompts.batch import PromptBatch
from ..prompts.build import TextPiece, build_segments
from ..prompts.documents import ANSWER
from ..runs.checks import check_hooks
from ..system.arguments import check_counts, checked
from ..system.hidden_warnings import hidden_warnings
from ..system.torch_state import gradient_mode, own_random_state
from .step_flows import StepFlowsRecord, check_options, step_flows

# What ``generate`` gets and returns.
_SET_HERE = (
    *("input", "max_new_tokens", "return_type"),
    *("output_logits", "return_cache", "return_input_tokens"),
)

_ROUNDING = 1e-4  # of the largest logit, between tokens after a cache and all tokens at once


@dataclass(frozen=True, eq=False)
class GenerationTrace:
    """What a model wrote after a prompt, and where it came from.

    Attributes:
        text: What the model wrote.
        batch: The prompt with the written tokens, which are its segment ``answer``.
        flows: Flows of each written token; see ``StepFlowsRecord``.
    """

    text: str
    batch: PromptBatch
    flows: StepFlowsRecord

    def __repr__(self) -> str:
        """One line: the text and its number of tokens."""
        return f"GenerationTrace({printable(shorten(self.text))}; {len(self.flows.loss)} tokens)"

    def plot(self) -> go.Figure:
        """What each written token reads from each segment."""
        return self.flows.plot()


@checked
def trace_generation(
    model: HookedModel,
    prompt: str | Sequence[TextPiece],
    *,
    max_new_tokens: int = 20,
    seed: int = 0,
    hooks: HooksOfBatch | Sequence[Hook] = (),
    weight: Weight = saliency,
    **options: Any,
) -> GenerationTrace:
    """Let the model write after a prompt, and find where each written token comes from.

    The model writes with its key-value cache, if it continues from one. Then one pass over the
    whole text computes the flows. In both, each written token must have the same probability up to
    rounding: otherwise the flows would be of another model than the one that wrote.

    Args:
        model: A hooked model with its tokenizer.
        prompt: A text (the segment ``prompt``), or named pieces as in ``build_segments``.
        max_new_tokens: Most tokens that are written; it stops before the end-of-text token.
        seed: Seed of sampling, if ``options`` ask for it; the global random state is as before.
        hooks: Hooks that act while the model writes, and in the pass over the whole text: a
            function of the batch with the prompt, or a list; none that replace or reweight.
        weight: See ``step_flows``.
        **options: For the model's ``generate``, such as ``do_sample=True, temperature=0.7``.

    Raises:
        PromptError: A segment is called ``answer``, prompt and answer do not fit the model, it has
            no tokenizer or ends the text at once, or ``generate`` has no such option.
        HookError: ``hooks`` are of other prompts, have no point, or replace or reweight something.
        MetricError: ``weight`` is wrong; see ``step_flows``.
        ModelError: Value biases are folded, logits are not finite, or the pass over the whole text
            gives written tokens another probability.

    Examples:
        >>> pieces = [("document", "The museum opens at ten. "), ("question", "When? At")]
        >>> trace = al.trace_generation(model, pieces, max_new_tokens=3)
        >>> trace.flows.axis_names("segment")
        ('document', 'question', 'answer')
        >>> page = al.plot_answer(trace.flows)  # a notebook shows what each token reads
    """
    refuse_values(weight, "al.trace_generation")
    ensure_prepared(model)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise PromptError("the model has no tokenizer; load it with one (tokenizer=...)")
    check_counts(PromptError, max_new_tokens=max_new_tokens)
    pieces = [("prompt", prompt)] if isinstance(prompt, str) else prompt
    known = [
        name
        for name, parameter in signature(model.generate).parameters.items()  # type: ignore[attr-defined]
        if parameter.kind is not Parameter.VAR_KEYWORD and name not in _SET_HERE
    ]
    if wrong := [name for name in options if name not in known]:
        raise PromptError(
            f"{wrong[0]!r} is no option here; those of the model's generate are {', '.join(known)}"
        )
    [prompt_batch] = build_segments(tokenizer, [pieces])
    check_options(model, prompt_batch, weight)
    if ANSWER in prompt_batch.segment_names:
        raise PromptError(
            f"a piece of the prompt is called {ANSWER!r}, which the model writes; rename it"
        )
    length = prompt_batch.tokens.shape[1]
    if length + max_new_tokens > model.cfg.n_ctx:
        raise PromptError(
            f"the prompt has {length} tokens and the model's context {model.cfg.n_ctx}: "
            f"max_new_tokens={max_new_tokens} does not fit; use a shorter prompt or fewer tokens"
        )
    check_fits(model, prompt_batch)
    refuse_media_tokens(model, prompt_batch)
    refuse_another_rotation(model, length, length + max_new_tokens)
    acting = _acting(model, hooks, prompt_batch)
    tokens, logits = written_tokens(model, prompt_batch, max_new_tokens, seed, options, acting)
    names, count = [*prompt_batch.segment_names, ANSWER], tokens.shape[1] - length
    if not count:
        raise PromptError(
            "the model ends the text at once; pass another prompt, or stop_at_eos=False"
        )
    batch = PromptBatch.from_segments(
        tokens,
        torch.nn.functional.pad(prompt_batch.segments, (0, count), value=len(names) - 1),
        names,
        begins_with_bos=prompt_batch.begins_with_bos,
    )
    with frozen_in_eval_mode(model), added_hooks(model, in_longer_text(acting, tokens)):
        flows = step_flows(model, batch, ANSWER, weight=weight)
    _refuse_another_text(model, tokens[0, length:], logits, flows.loss)
    return GenerationTrace(str(tokenizer.decode(tokens[0, length:].tolist())), batch, flows)


def _acting(
    model: HookedModel, hooks: HooksOfBatch | Sequence[Hook], batch: PromptBatch
) -> Sequence[Hook]:
    """The hooks of a prompt, which can act while the model writes."""
    of_batch: HooksOfBatch = hooks if callable(hooks) else lambda batch: hooks
    check_hooks(model, of_batch, [batch])
    acting = of_batch(batch)
    if wrong := [point for point, act in acting if isinstance(act, WholeHook)]:
        raise HookError(
            f"a hook at {wrong[0]} replaces or reweights in whole prompts, and cannot act while "
            "the model writes; give hooks that cut or scale edges or detach heads, or functions"
        )
    return acting


def written_tokens(
    model: Any,
    prompt: PromptBatch,
    count: int,
    seed: int,
    options: dict[str, Any],
    hooks: Sequence[Hook] = (),
) -> tuple[Tensor, Float[Tensor, "step vocab"]]:
    """The prompt with the tokens that the model writes after it, and the logits of these."""
    end = model.tokenizer.eos_token_id
    defaults = {
        "do_sample": False,
        "verbose": False,
        "stop_at_eos": end is not None,
        "use_past_kv_cache": not facts_of(model).why_no_cache,
    }
    with (
        frozen_in_eval_mode(model),
        own_random_state(devices_of_layers(model), seed % 2**64),
        gradient_mode(False),
        head_in_float32(model),
        added_hooks(model, hooks),
        # TransformerLens 4.3 names the cache as it was called until transformers 5.23.
        hidden_warnings("`past_key_values` is deprecated", FutureWarning),
    ):
        written = model.generate(
            prompt.tokens.to(device_of(model)),
            max_new_tokens=count,
            return_type="tokens",
            output_logits=True,
            **(defaults | options),
        )
    tokens = written.sequences.cpu()
    length = prompt.tokens.shape[1]
    ends = (tokens[0, length:] == end).nonzero().flatten() if end is not None else []
    stop = length + int(ends[0]) if len(ends) else tokens.shape[1]
    logits = torch.cat(list(written.logits))[: stop - length]
    return tokens[:, :stop], logits.float().cpu()


def _refuse_another_text(
    model: Any,
    tokens: Int[Tensor, " step"],
    logits: Float[Tensor, "step vocab"],
    losses: Float[Tensor, " step"],
) -> None:
    """Raise an error if written tokens have another probability in the pass over the whole text."""
    at_writing = -logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    allowed = max(_ROUNDING, 8 * torch.finfo(next(model.parameters()).dtype).eps)
    wrong = ~((at_writing - losses).abs() <= 2 * allowed * logits.abs().amax(1))
    if wrong.any():
        step = int(wrong.nonzero()[0])
        written, whole = (float(each[step].neg().exp()) for each in (at_writing, losses))
        raise ModelError(
            f"the model wrote token {step + 1} of the answer with the probability {written:.3g}, "
            f"but in one pass over the whole text the token has {whole:.3g}. Its key-value cache "
            "changes what it writes; pass use_past_kv_cache=False, and remove hooks that act on "
            "whole prompts"
        )
