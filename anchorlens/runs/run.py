"""``run`` and ``target_logits``: answers to questions, or logits, of all batches of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ..errors import MetricError
from ..metrics.question import HooksOfBatch, Question, no_hooks
from ..models.hooked import HookedModel
from ..passes.losses import LossOfBatch, label_cross_entropy
from ..prompts.batch import PromptBatch
from ..results.record import Results
from ..system.arguments import checked
from .study import Study


@checked
def run(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    questions: Sequence[Question],
    *,
    hooks: HooksOfBatch | None = None,
    loss: LossOfBatch = label_cross_entropy,
    gradient_checkpointing: bool = False,
    share_prefix: bool = True,
    resamples: int = 200,
    folder: str | Path | None = None,
    believe: Sequence[str] = (),
    progress: bool = True,
) -> Results:
    """Answer any number of questions: metrics of one pass over each batch, or of more passes.

    Each batch needs one forward pass, one backward pass if a metric needs it, and further passes of
    questions such as ``EdgeSweep``, which start from what the first has computed. Demonstrations
    that prompts share run once, if that gives the same logits and gradients
    (``info["shared_prefix"]`` of each record tells whether, or the reason). Parameters are frozen
    and dropout is off during the run; afterwards both are as before, and no hook is left. Hooks on
    names after the last block take longer: all positions go through the unembedding then.

    If accelerate made several processes, they divide the batches, and all get all results.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        batches: Prompts from ``build_prompts``; batches of several calls may be joined.
            Contributions are in the order of the queries; those of joined calls are sorted by set
            of demonstrations first.
        questions: Metrics and questions of the package, or your own.
        hooks: Function of the batch, as it is run with its padding on the right, to hooks that
            change the run (``al.isolate_labels``, ...). They act before the metrics observe, and a
            clean pass runs first. Questions of more passes refuse them.
        loss: Function of (logits, batch) to one number a prompt, for metrics with a gradient;
            summed over prompts. An error if no question takes it; ``al.Loss`` has its own.
        gradient_checkpointing: For prompts too long for the memory: the pass with a gradient stores
            only the input of each block, and runs the block again in the backward pass. Attention
            takes the memory of one layer then, the numbers are the same, and the time is about one
            more forward pass. ``hooks`` must do the same both times; metrics observe once. An error
            if no metric needs a gradient. Where attention is fused and a prompt would not fit into
            the free memory, blocks run so without being asked (``info["attention"]``).
        share_prefix: False runs whole prompts, also where shared tokens could run once.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Stores what each batch contributed to each question. The same call continues from
            there, one with more questions computes these alone; ``forget_run`` starts over.
        believe: Names, as in errors and warnings, of what may differ from ``folder`` or cannot be
            compared, because you know that it gives the same numbers: a package (``"torch"``), a
            setting (``"hooks"``), a question (``"accuracy"``). What differs is said, and the first
            and last batch are computed again.
        progress: Show a progress bar.

    Returns:
        The record of each question under its name, in a dict that a notebook shows as a table.

    Raises:
        AnchorlensError: Before any pass: prompts do not fit the model or a question, two questions
            have one name, or the model's hooks do not act.
        RunError: A question has no result; all others are in its ``results``.
        StoreError: ``folder`` holds another run, or cannot be written into.
        MemoryLimitError: A prompt alone does not fit into memory; batches are made smaller first.

    Examples:
        >>> metrics = [al.SaliencyFlows(), al.AttentionAUCROC()]
        >>> results = al.run(model, batches, metrics, progress=False)
        >>> frame = results["saliency_flows"].to_frame()
    """
    settings: dict[str, Any] = {"loss": loss, "hooks": hooks}
    settings["gradient_checkpointing"] = gradient_checkpointing
    options: dict[str, Any] = {"folder": folder, "believe": believe, "progress": progress}
    with Study(model, batches, settings, resamples=resamples, **options).entered() as study:
        if not questions:
            raise MetricError(
                "there is nothing to compute: give at least one metric or another question"
            )
        passes = study.passes(questions, share_prefix=share_prefix, **settings)
        return study.answers(passes, questions)


@checked
def target_logits(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    *,
    hooks: HooksOfBatch | None = None,
    progress: bool = True,
) -> Float[Tensor, "prompt vocab"]:
    """Next-token logits at the targets of all prompts, in the order of the queries, on the CPU.

    For your own comparisons, such as ``loyalty`` of the same queries after other demonstrations.

    Arguments are those of ``run``, and so is the error for prompts or hooks that do not fit.

    Examples:
        >>> logits = al.target_logits(model, batches, progress=False)
        >>> float(al.metrics.loyalty(logits, logits, batches[0].label_token_ids).label_loyalty)
        1.0
    """
    settings = {"experiment": "logits", "hooks": hooks}
    with Study(model, batches, settings, resamples=0, progress=progress).entered() as study:
        passes, change = study.passes(hooks=hooks), no_hooks if hooks is None else hooks
        found = study.collect(lambda batch: {"logits": passes.logits(batch, change, "hooks").cpu()})
        return found["logits"]
