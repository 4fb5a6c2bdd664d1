"""A text that the model writes, and where each of its tokens comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from reprlib import repr as shorten
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..errors import PromptError
from ..metrics.step_flows import StepFlowsRecord, check_options, step_flows
from ..metrics.weights import Weight, refuse_values, saliency
from ..models.hooked import HookedModel, check_fits, device_of
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..models.rotary import refuse_another_rotation
from ..prompts.batch import PromptBatch
from ..prompts.segments import TextPiece, build_segments

ANSWER = "answer"
"""The segment of the tokens that the model writes."""

# What ``generate`` gets and returns.
_SET_HERE = ("input", "max_new_tokens", "return_type", "output_logits", "return_cache")


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
        return f"GenerationTrace({shorten(self.text)}; {len(self.flows.loss)} tokens)"

    def plot(self) -> go.Figure:
        """What each written token reads from each segment."""
        return self.flows.plot()


def trace_generation(
    model: HookedModel,
    prompt: str | Sequence[TextPiece],
    *,
    max_new_tokens: int = 20,
    seed: int = 0,
    weight: Weight = saliency,
    chunk: int = 8,
    **options: Any,
) -> GenerationTrace:
    """Let the model write after a prompt, and find where each written token comes from.

    The model writes with its key-value cache. Then one pass over the whole text, with the written
    tokens given, computes the flows: the same logits up to rounding.

    Args:
        model: A hooked model with its tokenizer.
        prompt: A text, or pieces of text with the names of their segments, as in
            ``build_segments``. A text is the segment ``prompt``.
        max_new_tokens: Most tokens that are written; it stops before the end-of-text token.
        seed: Seed where ``options`` ask for sampling; the global random state is as before.
        weight: See ``step_flows``.
        chunk: See ``step_flows``.
        **options: For the model's ``generate``, such as ``do_sample=True, temperature=0.7``; the
            likeliest token is written by default.

    Raises:
        PromptError: A segment is called ``answer``, the prompt and the answer do not fit the model,
            the model has no tokenizer, it ends the text at once, or ``generate`` has no such
            option.
        MetricError: ``weight`` or ``chunk`` is wrong; see ``step_flows``.
        ModelError: The value biases of the model are folded, or its logits are not finite.

    Examples:
        >>> pieces = [("document", "The museum opens at ten. "), ("question", "When? At")]
        >>> trace = al.trace_generation(model, pieces, max_new_tokens=3)
        >>> trace.flows.axis_names("segment")
        ('document', 'question', 'answer')
        >>> len(trace.flows.loss)
        3
        >>> page = al.plot_answer(trace.flows)  # a notebook shows what each token reads
    """
    refuse_values(weight, "al.trace_generation")
    ensure_prepared(model)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise PromptError("the model has no tokenizer; load it with one (tokenizer=...)")
    if (
        isinstance(max_new_tokens, bool)
        or not isinstance(max_new_tokens, int)
        or max_new_tokens < 1
    ):
        raise PromptError(f"max_new_tokens must be a whole number from 1; got {max_new_tokens!r}")
    pieces = [("prompt", prompt)] if isinstance(prompt, str) else prompt
    _check_names(model, options)
    [prompt_batch] = build_segments(tokenizer, [pieces])
    check_options(model, prompt_batch, weight, chunk)
    if ANSWER in prompt_batch.segment_names:
        raise PromptError(
            f"a piece of the prompt is called {ANSWER!r}, as the text that the model writes; "
            "choose another name"
        )
    length = prompt_batch.tokens.shape[1]
    if length + max_new_tokens > model.cfg.n_ctx:
        raise PromptError(
            f"the prompt has {length} tokens and the model's context {model.cfg.n_ctx}, so that "
            f"max_new_tokens={max_new_tokens} does not fit; use a shorter prompt or fewer tokens"
        )
    check_fits(model, prompt_batch)
    refuse_another_rotation(model, length, length + max_new_tokens)
    tokens = _written(model, prompt_batch, max_new_tokens, seed, options)
    batch = PromptBatch.from_segments(
        tokens,
        torch.cat(
            [
                prompt_batch.groups,
                torch.full((1, tokens.shape[1] - length), len(prompt_batch.segment_names)),
            ],
            dim=1,
        ),
        [*prompt_batch.segment_names, ANSWER],
        begins_with_bos=prompt_batch.begins_with_bos,
    )
    return GenerationTrace(
        text=str(tokenizer.decode(tokens[0, length:].tolist())),
        batch=batch,
        flows=step_flows(model, batch, ANSWER, weight=weight, chunk=chunk),
    )


def _check_names(model: Any, options: dict[str, Any]) -> None:
    """Raise an error for options that ``generate`` does not know, or that are set here."""
    known = [
        name
        for name, parameter in signature(model.generate).parameters.items()
        if parameter.kind is not Parameter.VAR_KEYWORD and name not in _SET_HERE
    ]
    if wrong := [name for name in options if name not in known]:
        raise PromptError(
            f"{wrong[0]!r} is no option here; those of the model's generate are {', '.join(known)}"
        )


def _written(
    model: Any, prompt: PromptBatch, count: int, seed: int, options: dict[str, Any]
) -> Tensor:
    """The prompt and the tokens that the model writes after it, without the end of the text."""
    end = model.tokenizer.eos_token_id
    device = device_of(model)
    devices = [device] if device.type == "cuda" else []
    defaults = {"do_sample": False, "verbose": False, "stop_at_eos": end is not None}
    with frozen_in_eval_mode(model), torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        tokens: Tensor = model.generate(
            prompt.tokens.to(device),
            max_new_tokens=count,
            return_type="tokens",
            **(defaults | options),
        ).cpu()
    length = prompt.tokens.shape[1]
    ends = (tokens[0, length:] == end).nonzero().flatten() if end is not None else []
    stop = length + int(ends[0]) if len(ends) else tokens.shape[1]
    if stop == length:
        raise PromptError(
            "the model ends the text at once, so that there is nothing to trace; let the prompt "
            "end where a text goes on, or pass stop_at_eos=False"
        )
    return tokens[:, :stop]
