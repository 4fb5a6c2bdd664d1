"""The text of a hard prompt in other models (PEZ: prompts that were found with one model).

1. Encode the text with the tokenizer of the other model, and check that it decodes to the text.
2. Answer queries after it there, after no text, and after random tokens, as many as it has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import PromptError
from ..metrics.predictions import predicted_class, require_gold
from ..models.hooked import HookedModel, device_of
from ..passes.memory import free_memory
from ..prompts.batch import PromptBatch
from ..prompts.control_tokens import control_tokens
from ..prompts.demonstration_sets import task_of_name
from ..prompts.examples import Example
from ..prompts.label_positions import refuse_control_tokens
from ..prompts.tasks import Task
from ..results import figures
from ..results.bootstrap import with_intervals
from ..results.contributions import Contributions
from ..results.kinds import difference, mean, over_draws, share, table
from ..results.population import check_resamples
from ..results.record import Record
from ..results.text_frame import TextFrame
from ..runs.identity import versions
from ..runs.several_models import MakePrompts, folder_of, maker_of_prompts, outcome_of, sources_of
from ..runs.store import make_folder
from ..runs.study import Study
from ..system.arguments import check_counts, checked
from ..system.processes import fails_together
from ..system.warn import warn_user
from .hard_prompt import HardPrompt, after_tokens, random_tokens, tokenizer_of
from .protocol import Context, NoContext, bos_of, check_queries
from .training import query_digests

_SHARED = ("labels", "prompts", "drawn", "units")  # in ``info``, the same in all models


@dataclass(frozen=True, eq=False, kw_only=True)
class HardPromptTransferRecord(Record):
    """What the text of a hard prompt does in several models, which ``info["models"]`` names.

    A model that failed has NaN, and its reason in ``info["missing"]``.

    Attributes:
        tokens: Number of tokens of the text in each model, without the BOS; 0 where it failed.
        accuracy: Share of queries that are answered right after the text, from 0 to 1.
        empty_accuracy: The same with nothing before the query.
        random_accuracy: The same after each draw of random tokens, as many as the text has.
        gain_over_empty: Accuracy minus that with nothing, paired by query, from -1 to 1; above 0
            means that the text helps this model.
        gain_over_random: Accuracy minus the mean of the random tokens, paired by query, from -1 to
            1; above 0 means that it is this text that does it, and not that there is one.
    """

    tokens: Int[Tensor, " model"] = table()
    accuracy: Float[Tensor, " model"] = share("text")
    empty_accuracy: Float[Tensor, " model"] = share("empty")
    random_accuracy: Float[Tensor, "model draw"] = share(
        lambda of_set: of_set["random_tokens"][:, None]
    )
    gain_over_empty: Float[Tensor, " model"] = difference("text", "empty")
    gain_over_random: Float[Tensor, " model"] = mean(
        "text", -1, 1, minus=over_draws("random_tokens")
    )

    caption: ClassVar[str] = (
        "The text of a hard prompt, encoded by the tokenizer of each model: accuracy after it, "
        "with nothing before the query, and after random tokens, as many as the text has (their "
        "mean, with the range of the draws). A text that transfers is above both in a model with "
        "which it was not found."
    )
    names_in_info: ClassVar[Mapping[str, str]] = {"model": "models"}

    def table(self) -> TextFrame:
        """A row for each model: its numbers with intervals, and why there are none.

        Of the random tokens it has the mean, and the range of the draws.
        """
        rows, missing = {}, self.info.get("missing", {})
        for model, name in enumerate(self.info["models"]):
            draws = self.random_accuracy[model]
            texts = {
                "tokens": str(int(self.tokens[model])),
                "accuracy": self.text("accuracy", model),
                "empty": self.text("empty_accuracy", model),
                "random": f"{draws.mean():.2f} ({draws.min():.2f} to {draws.max():.2f})",
                "gain over empty": self.text("gain_over_empty", model),
                "gain over random": self.text("gain_over_random", model),
            }
            reason = {"what is missing": missing.get(name, "")} if missing else {}
            rows[name] = (dict.fromkeys(texts, "") if name in missing else texts) | reason
        return TextFrame.from_dict(rows, orient="index").rename_axis("model")

    def plot(self) -> go.Figure:
        """Bars of each model with intervals: the text, nothing, and the range of random tokens."""
        draws = self.random_accuracy
        values = torch.stack([self.accuracy, self.empty_accuracy, draws.mean(1)], -1)
        ends = [
            self.intervals.get(name, getattr(self, name).expand(2, -1))
            for name in ("accuracy", "empty_accuracy")
        ]
        low, high = torch.stack([*ends, torch.stack([draws.amin(1), draws.amax(1)])], -1)
        return figures.bars(
            values[None],
            ["accuracy"],
            self.info["models"],
            ["text of the hard prompt", "nothing", "random tokens, range of draws"],
            title="A hard prompt in each model",
            low=low[None],
            high=high[None],
        )


@checked  # the outermost, so that warnings are at the line of the user
@fails_together()
def transfer_hard_prompt(
    prompt: HardPrompt,
    models: str | Path | Sequence[str | Path] | Mapping[str, Any],
    task: str | Task | MakePrompts,
    examples: Sequence[Example] | Sequence[Sequence[Example]] | None = None,
    *,
    queries: int | None = None,
    shots: int | None = None,
    seeds: Sequence[int] | None = None,
    batch_size: int | None = None,
    draws: int = 20,
    seed: int = 0,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> HardPromptTransferRecord:
    r"""What the text of a hard prompt does in other models than that with which it was found.

    The text is encoded by the tokenizer of each model, and stands after the BOS, before the query.
    Beside it: nothing before the query, and random plain tokens of that model, as many as the text
    has there (those of ``al.contexts.hard_prompts.random``). With c_i = 1 where the answer of
    query i is right, else 0:

    $$
    \mathrm{gain} = \frac{1}{n} \sum\limits_{i=1}^{n} \left( c_i(\mathrm{text}) -
    c_i(\mathrm{control}) \right)
    $$

    Models are as in ``across_models``: each is freed before the next is loaded, and one that fails
    is a row with its reason, and a warning.

    Range:
        Accuracies 0 to 1, gains -1 to 1.

    How to read:
        A text transfers to a model if its gains over both controls are above 0 there. In the model
        with which it was found, and on the queries on which it was measured, its accuracy is the
        prompt's ``encoded_accuracy``.

    Pitfalls:
        Give queries that no training used. Only a model with the prompt's tokenizer can tell that
        it did, and is then a row with this reason. An interval is over queries and does not speak
        of other prompts, so search with several seeds.

    Source:
        Wen et al. (NeurIPS 2023), the table of transfer between language models.

    Args:
        prompt: From ``train_hard_prompt`` or ``al.contexts.hard_prompts``. Only its text is used.
        models: As in ``across_models``: names, folders or ``.gguf`` files, or a mapping by names of
            your own, whose values may also be hooked models, and functions that load one.
        task: As in ``across_models``; a name, a task, or a function of the tokenizer that makes the
            prompts. Their demonstrations are not run.
        examples: As in ``sample_prompts``.
        queries: As in ``sample_prompts``, whose defaults count.
        shots: As in ``sample_prompts``.
        seeds: As in ``sample_prompts``.
        batch_size: As in ``sample_prompts``.
        draws: Number of random prompts in each model.
        seed: Seeds their tokens.
        resamples: Bootstrap resamples for the 95 % intervals; 0 for none.
        folder: Stores what each batch of each model contributed; the same call goes on from there.
            What is stored of another run is not used: the row of its model fails, with the reason.
        progress: Show a bar for each model.

    Returns:
        The accuracies of each model, in the order of ``models``.

    Raises:
        PromptError: Before any weights are loaded: the prompt has no text, or is of a task with
            other labels.
        AnchorlensError: Before any weights are loaded: another argument is wrong.

    Examples:
        >>> prompt = al.contexts.hard_prompts.of_tokens(model, [300, 301], held_out=batches)
        >>> record = al.contexts.transfer_hard_prompt(
        ...     prompt, {"same": model}, lambda tokenizer: batches, draws=2, progress=False)
        >>> bool(record.accuracy[0].float() == prompt.encoded_accuracy)
        True
    """
    sources = sources_of(models, None, {})
    sampling = {"queries": queries, "shots": shots, "seeds": seeds, "batch_size": batch_size}
    make_prompts = maker_of_prompts(task, examples, sampling)
    check_counts(PromptError, draws=draws)
    check_resamples(resamples)
    if not prompt.text:
        raise PromptError("the hard prompt has no text that another model could read; got ''")
    if not callable(task):
        words = (task_of_name(task) if isinstance(task, str) else task).first_words
        _check_labels(prompt, [word.strip() for word in words])
    if folder is not None:
        make_folder(folder)
    records: dict[str, HardPromptTransferRecord] = {}
    missing: dict[str, str] = {}

    def measure(name: str, model: Any) -> None:
        settings = {"experiment": f"hard prompt in {name}", "text": prompt.text}
        study = Study(
            model,
            make_prompts(model.tokenizer),
            settings | {"draws": str(draws), "seed": str(seed)},
            folder=folder_of(folder, name),
            resamples=resamples,
            progress=progress,
        )
        with study.entered():
            records[name] = _measured(prompt, study, draws, seed)

    for name, load in sources.items():
        outcome = outcome_of(load, partial(measure, name))
        free_memory()  # the references of a model form cycles, which are freed only here
        if outcome.failed:
            missing[name] = outcome.failed
            records[name] = _no_numbers(draws, resamples)
        for warning in outcome.warnings:
            warn_user(f"{name}: {warning}")
    return _joined(records, {"text": prompt.text, "seed": seed, "missing": missing})


def _measured(prompt: HardPrompt, study: Study, draws: int, seed: int) -> HardPromptTransferRecord:
    """The record of a single model, after the text and its queries were checked."""
    model: Any = study.model
    batches, tokenizer = study.batches, tokenizer_of(model, None)
    text = _encoded(tokenizer, prompt.text)
    _check_labels(prompt, [label.strip() for label in batches[0].labels])
    for batch in batches:
        require_gold(batch.gold, "accuracy")
        if (batch.label_ends != batch.label_positions).any():
            raise PromptError(
                "a label word has several tokens in this model, of which only the first would "
                "count; use a task whose label words are single tokens in all models"
            )
    used = set(prompt.info.get("queries_in_training", ())) & set(query_digests(batches))
    if used:
        raise PromptError(
            f"{len(used)} of these queries were used to train or to choose the hard prompt, so "
            "that its accuracy would be too high; give other queries"
        )
    bos = bos_of(batches[0]).cpu()
    check_queries(model, batches, len(bos) + len(text))
    random = random_tokens(model, tokenizer, len(text), draws, seed)
    rows = [torch.cat([bos, row]).to(device_of(model)) for row in (text, *random)]
    contexts = [NoContext(), *(after_tokens(model, row, batches[0]) for row in rows)]
    contributions = study.collect(partial(_right, model, contexts))
    return study.record(partial(_record, count=len(text)), contributions)


def _right(
    model: HookedModel, contexts: Sequence[Context], batch: PromptBatch
) -> dict[str, Float[Tensor, "batch _"]]:
    """1 where the answer of a query is right, else 0: after nothing, the text, and each draw."""
    gold = require_gold(batch.gold, "accuracy")
    passes = [context.query_pass(model, batch).logits(model) for context in contexts]
    right = [predicted_class(batch.label_scores(logits)) == gold for logits in passes]
    correct = torch.stack(right, 1).cpu().double()
    return {"empty": correct[:, :1], "text": correct[:, 1:2], "random_tokens": correct[:, 2:]}


def _record(contributions: Contributions, count: int) -> HardPromptTransferRecord:
    """The numbers of one model, in which the text has ``count`` tokens."""
    tokens = torch.tensor([count], device="cpu")
    return HardPromptTransferRecord.of(contributions, tokens=tokens)


def _no_numbers(draws: int, resamples: int) -> HardPromptTransferRecord:
    """The row of a model that failed: NaN in all, also in the intervals."""
    counts = {"empty": 1, "text": 1, "random_tokens": draws}
    nan = {name: torch.full((1, k), torch.nan, device="cpu").double() for name, k in counts.items()}
    return with_intervals(partial(_record, count=0), nan, resamples=resamples, info={})


def _joined(
    records: Mapping[str, HardPromptTransferRecord], info: Mapping[str, Any]
) -> HardPromptTransferRecord:
    """The records of several models as one, along the axis of models."""
    rows = [*records.values()]
    known = next((row.info for row in rows if "labels" in row.info), {})
    shared = {key: known[key] for key in _SHARED if key in known}
    return HardPromptTransferRecord(
        **{name: torch.cat([row.tensors()[name] for row in rows]) for name in rows[0].axes()},
        intervals={
            name: torch.cat([row.intervals[name] for row in rows], 1) for name in rows[0].intervals
        },
        info={"models": [*records], **info, **shared, "versions": versions()},
    )


def _check_labels(prompt: HardPrompt, labels: Sequence[str]) -> None:
    """Raise an error if a hard prompt is of a task with other label words."""
    known = prompt.info.get("labels")
    if known is not None and [*known] != [*labels]:
        raise PromptError(
            f"the hard prompt is of a task with the labels {known}, and these queries have "
            f"{[*labels]}; give the task with which it was made"
        )


def _encoded(tokenizer: Any, text: str) -> Int[Tensor, " length"]:
    """The tokens of a text, without BOS; an error if they are not the whole text."""
    cure = ", by a search with allowed=... of tokens that both tokenizers know"
    refuse_control_tokens(tokenizer, control_tokens(tokenizer, cure=cure), text)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    back = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    if back != text or not ids:
        raise PromptError(
            f"the tokenizer of this model cannot encode the text {text!r}: its tokens give "
            f"{back!r} (unknown characters, or a text that is cut or normalised); search with "
            "allowed=... of tokens that both tokenizers know"
        )
    return torch.tensor(ids, dtype=torch.long, device="cpu")
