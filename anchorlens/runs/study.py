"""A study checks a model and its prompts, makes passes, collects contributions, and gives records.

``run`` asks it questions; trainings collect contributions of their own.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import MetricError, PromptError, StoreError
from ..metrics.question import HooksOfBatch, Question, no_hooks
from ..models.head import precision_of_logits
from ..models.hooked import HookedModel, check_fits, dtype_of, layers_without_pattern
from ..models.load import ensure_prepared
from ..models.media_tokens import check_media_tokens
from ..models.model_state import frozen_in_eval_mode
from ..passes.forward import Pass
from ..passes.losses import LossOfBatch, label_cross_entropy
from ..passes.memory import check_out_of_memory, free_memory, half_of
from ..passes.provide import need_gradient, reads_of
from ..prompts.batch import PromptBatch, check_prompts, digests
from ..prompts.segment_names import SEGMENTS
from ..prompts.verbalizer import TIES, warn_of_ties
from ..results.bootstrap import with_intervals
from ..results.contributions import Contributions
from ..results.depth import WITHOUT_PATTERN
from ..results.population import check_resamples, warn_if_few_units
from ..results.record import Record, Results
from ..system import processes
from ..system.hidden_warnings import hidden_warnings
from ..system.put_back import safe_context
from ..system.steps import Bar
from ..system.warn import warn_user
from . import checks
from .by_value import Identity, Known, identity_of
from .identity import Fingerprint, as_words, fingerprint, versions, warn_of_unknown
from .passes import Passes, contributed, results_of
from .store import CHANGED, Store, missing_in, require_same
from .way import patterns_are_large, way_of

R = TypeVar("R", bound=Record)


@dataclass(eq=False, repr=False)
class Study:
    """A model and its prompts, for one experiment: ``with Study(...).entered() as study``.

    It checks both, divides batches among processes, stores what each contributed, makes smaller
    ones where memory runs out, and computes intervals. ``settings`` tell it from others on the same
    model and prompts; ``settings["experiment"]`` names the bar where there are no questions.
    """

    model: HookedModel
    given: Sequence[PromptBatch]
    settings: dict[str, Any]
    _: KW_ONLY
    folder: str | Path | None = None
    believe: Sequence[str] = ()
    resamples: int = 200
    progress: bool = True
    batches: list[PromptBatch] = field(init=False)  # as they are run, from entering on
    # Passes, and what they were made of.
    _made: list[tuple[Passes, list[Any]]] = field(init=False, default_factory=list)
    _ties: dict[str, str] = field(init=False, default_factory=dict)
    _has_collected: bool = field(init=False, default=False)

    @safe_context
    def entered(self) -> Iterator["Study"]:
        """Inside, the model is frozen, with dropout off; no Ctrl-C leaves it so."""
        outside, error = sys.exception(), None
        with processes.fails_together():
            check_resamples(self.resamples)
            self.batches = checked_batches(self.model, self.given)
            if self.resamples and processes.is_main():
                warn_if_few_units(*cases_of(self.batches))
            if not processes.is_single_process():
                processes.require_whole_model(self.model)
                processes.require_equal_settings(
                    self._fingerprint.facts | {"folder": str(self.folder)}
                )
            try:
                with frozen_in_eval_mode(self.model):
                    yield self
            except GeneratorExit as end:
                error = end.__context__
            try:
                if error not in (None, outside):
                    raise error  # that of the block, of which fails_together tells the others
            finally:
                error = None  # otherwise its frames, and their tensors, would stay in memory

    def passes(
        self,
        questions: Sequence[Question] = (),
        *,
        hooks: HooksOfBatch | None = None,
        loss: LossOfBatch | None = label_cross_entropy,
        gradient_checkpointing: bool = False,
        share_prefix: bool = True,
    ) -> Passes:
        """The passes over batches, after the tokens that prompts share, or over whole prompts.

        Wrong arguments, which are those of ``run``, are an error here, before the model runs.
        """
        checks.require_questions(questions)
        questions = [checks.asked_of(each, self.model, self.batches) for each in questions]
        observed = checks.check_questions(self.model, self.batches, questions, hooks, loss)
        needed = {
            each.name: checks.further_of(each, self.model, self.batches) for each in questions
        }
        further = [hooks_of for each in needed.values() for hooks_of in each.hooks]
        for change in further if hooks is None else [*further, hooks]:
            checks.check_hooks(self.model, change, self.batches)
            checks.refuse_moved_hooks(self.given, self.batches, change)
            checks.check_edges_of_hooks(change, self.batches)
        differentiates = any(each.needs_gradient for each in observed)
        of_gradient = {
            name: any(need_gradient(reads_of(metric, self.batches[0])) for metric in each.metrics)
            for name, each in needed.items()
        }
        if gradient_checkpointing and not (differentiates or any(of_gradient.values())):
            raise MetricError(
                "gradient_checkpointing=True saves memory of the gradient, but none of "
                f"{[each.name for each in questions]} needs one; leave it out"
            )
        used = loss if differentiates else None
        saves = gradient_checkpointing and differentiates
        Pass(self.model, self.batches[0], loss=used, gradient_checkpointing=saves).check_gradient()
        self._store  # noqa: B018 - the folder of another run is an error before all else
        metrics = {
            name: self.passes(
                each.metrics,
                loss=each.loss if of_gradient[name] else None,
                gradient_checkpointing=gradient_checkpointing and of_gradient[name],
                share_prefix=share_prefix,
            )
            for name, each in needed.items()
            if each.metrics
        }
        way = way_of(
            self.model,
            self.batches,
            [*further, no_hooks if hooks is None else hooks],
            observed,
            used,
            [each.way for each in metrics.values()],
            gradient_checkpointing=saves,
            share_prefix=share_prefix,
        )
        layers = {layer for each in needed.values() for layer in each.layers}
        made = Passes(self.model, self.batches, way, questions, hooks, loss, layers, metrics)
        self._made.append((made, [questions, hooks, loss]))
        return made

    def answers(self, passes: Passes, asked: Sequence[Question]) -> Results:
        """The record of every question; stored contributions are those of questions as asked."""
        decides = {each.name: [each.stored_as(), passes.hooks, passes.loss] for each in asked}
        with passes.way.entered():
            contributions = self._collect(passes.contributions, decides)

        def answered(question: Question, found: Mapping[str, Tensor]) -> Record:
            once = checks.once_of(question, passes, found)
            info = passes.way.info() | once.pop("info")
            return self.record(partial(question.result, **once), found, info)

        return results_of(passes.questions, contributions, answered, passes.reasons())

    def collect(
        self, contributions_of: Callable[[PromptBatch], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The contributions of all prompts in the order of their queries, whatever that of batches.

        ``contributions_of`` gives what each prompt of a batch contributes: tensors [prompt, ...] by
        name, on the CPU. Batches that do not fit into memory run in parts, and several processes
        divide them; all return all contributions. With a folder this is called once.
        """
        of_batch = partial(contributed, contributions_of)
        found = self._collect(lambda batch, names: of_batch(batch), {"": contributions_of})
        self._ties = warn_of_ties(found.pop(TIES, None))
        return found

    def _collect(
        self,
        contributions_of: Callable[[PromptBatch, Sequence[str]], dict[str, Tensor]],
        decides: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """The contributions to each of the names of ``decides``, which says what decides them."""
        store = self._store_of(decides)
        if store is not None and self._has_collected:
            raise StoreError(
                f"{store.folder} holds the contributions that this study has collected already; "
                "collect all in one call, or open another study with another folder"
            )
        self._has_collected = True
        fitting, names = PartsThatFit(contributions_of), list(decides)
        if store is not None:
            if processes.is_main():
                self._check_stored(store, fitting)
            processes.gather_from_processes("what is stored", None)
        numbers, is_single = self._numbers(store), processes.is_single_process()
        collected = {number: {} if store is None else store.read(number) for number in numbers}
        missing = {n: missing_in(part, names) if part else names for n, part in collected.items()}
        with self._bar(names, missing) as bar:
            for number in filter(missing.get, numbers):
                if not is_single and processes.failed_elsewhere():
                    break
                part = self._parts[number]
                contributions = fitting.contributions(part, missing[number], bar.update)
                if store is not None:
                    store = self._unless_changed(store, decides)
                    store.write(number, contributions)
                collected[number] |= contributions
        parts = [*collected.values()]
        if not is_single:  # copies, because a view would be sent with its whole storage
            copies = [{name: values.clone() for name, values in part.items()} for part in parts]
            parts = list(chain(*processes.gather_from_processes("contributions", copies)))
        contributions = in_order(self.batches, parts)
        # Those of a question are missing where it failed, which its passes report.
        plain = {name for part in parts for name in part if "/" not in name}
        if unlike := plain - contributions.keys():
            raise MetricError(
                f"contributions {', '.join(sorted(unlike))} must be in every batch, in one shape"
            )
        return contributions

    def record(
        self,
        result: Callable[[Contributions], R],
        contributions: Mapping[str, Tensor],
        info: Mapping[str, Any] | None = None,
    ) -> R:
        """What a pure function makes of the contributions of all prompts, with its intervals."""
        sets, texts = cases_of(self.batches)
        return with_intervals(
            result,
            contributions,
            sets=sets,
            texts=texts,
            resamples=self.resamples,
            info=self.describe() | self._ties | dict(info or {}),
        )

    def describe(self) -> dict[str, Any]:
        """The model, the prompts and the versions to which the numbers belong."""
        logits = precision_of_logits(self.model)
        return {
            "model": str(self.model.cfg.model_name),
            **describe_layers(self.model),
            "dtype": str(dtype_of(self.model)).removeprefix("torch."),
            **({"logits": logits} if logits else {}),
            **describe_prompts(self.batches),
            "versions": versions(),
        }

    @cached_property
    def _parts(self) -> list[PromptBatch]:
        """What is computed, stored and given to a process as one: batches, or long prompts."""
        # Several long prompts at a time save no time, and their padding takes memory.
        if not patterns_are_large(self.model, self.batches):
            return self.batches
        return [batch.prompt(number) for batch in self.batches for number in range(len(batch))]

    def _store_of(self, decides: Mapping[str, Any]) -> Store | None:
        """The folder of contributions, which knows what decides those of each name."""
        if self._store is None and processes.is_single_process():
            return None
        computed = self._identities_of(decides)
        functions = {name: each.digest for name, each in computed.items()}
        processes.require_equal_settings(
            {f"what {n or 'the function of each batch'} computes": functions[n] for n in functions}
        )
        if self._store is None:
            return None
        known = {*self._fingerprint.facts, *functions}
        if strange := [name for name in self.believe if name not in known]:
            raise StoreError(
                f"believe names {', '.join(strange)}, but what is compared is: "
                f"{', '.join(sorted(filter(None, known)))}"
            )
        unknown = self._fingerprint.unknown | {n: each.unknown for n, each in computed.items()}
        unknown = {n: each for n, each in unknown.items() if each and n not in self.believe}
        warn_of_unknown(self._store.folder, unknown)
        of_all = unknown.keys() <= computed.keys()  # and nothing of the run is unknown
        believed = frozenset(name for name in computed if of_all and name not in unknown)
        return replace(self._store, functions=functions, believed=believed)

    def _identities_of(self, decides: Mapping[str, Any]) -> dict[str, Identity]:
        """The identity of what decides the contributions of each name; a question is also told."""
        found = dict[str, Identity]()
        self._known.names |= {id(made): f"passes {n}" for n, (made, _) in enumerate(self._made)}
        for name, what in decides.items():
            # A function may use passes, which are what they were made of.
            all_of_it = what if name else [what, *(made_of for _, made_of in self._made)]
            digest, unknown = identity_of(all_of_it, self._known)
            told = f"{as_words(what[0])} ({digest[:16]})" if name else digest
            found[name] = Identity(told, unknown)
        return found

    def _unless_changed(self, store: Store, decides: Mapping[str, Any]) -> Store:
        """The store, which does not believe a function from where it has changed itself on."""
        now = self._identities_of(decides)
        changed = [n for n in store.believed if now[n].digest != store.functions[n]]
        if not changed:
            return store
        reason = "a function of this run changes what it holds while it runs"
        warn_of_unknown(store.folder, {name: [reason] for name in changed})
        functions = {**store.functions, **dict.fromkeys(changed, CHANGED)}
        return replace(store, functions=functions, believed=store.believed - {*changed})

    @cached_property
    def _known(self) -> Known:
        known = Known(self.model)
        known.names[id(self)] = "the study"
        return known

    @cached_property
    def _fingerprint(self) -> Fingerprint:
        return fingerprint(self.model, self._parts, self.settings, self._known)

    @cached_property
    def _store(self) -> Store | None:
        """The folder of contributions, which is opened after the arguments were checked."""
        if self.folder is None:
            if self.believe:
                raise StoreError("believe names what is stored in a folder; give one, or leave it")
            return None
        return Store.open(self.folder, self._fingerprint.facts, self.believe)

    def _numbers(self, store: Store | None) -> list[int]:
        """Numbers of this process's batches; what is missing is as the main process sees it."""
        if processes.is_single_process():
            return [*range(len(self._parts))]
        costs = [batch.tokens.numel() for batch in self._parts]
        if store is not None and processes.is_main():
            with hidden_warnings():  # the loop warns of a damaged file
                costs = [
                    cost if missing_in(store.read(number), store.functions) else 0
                    for number, cost in enumerate(costs)
                ]
        return processes.batches_of_process(processes.gather_from_processes("batches", costs)[0])

    def _bar(self, names: Iterable[str], missing: Mapping[int, Sequence[str]]) -> Bar:
        """The bar of prompts. Stored ones are done, and do not count for the remaining time."""
        counts = {number: len(self._parts[number].tokens) for number in missing}
        title = ", ".join(filter(None, names)) or str(self.settings.get("experiment", "batches"))
        return Bar(
            title=shorten(title, 40, placeholder=" …"),
            total=sum(counts.values()),
            initial=sum(count for number, count in counts.items() if not missing[number]),
            disable=not (self.progress and processes.is_main()),
            unit=" prompts",
        )

    def _check_stored(self, store: Store, fitting: "PartsThatFit") -> None:
        """Compute the first and the last stored batch again, as what acts late is in no other."""
        numbers, ends = range(len(self._parts)), dict[int, dict[str, Tensor]]()
        with hidden_warnings():  # the loop warns of a damaged file
            for order in (numbers, numbers[::-1]):
                rows = ((number, store.read(number)) for number in order)
                ends |= islice((each for each in rows if each[1]), 1)
        for number, stored in ends.items():
            missing = missing_in(stored, store.functions)
            names = [name for name in store.functions if name not in missing]
            computed = fitting.contributions(self._parts[number], names)
            require_same(
                {n: each for n, each in stored.items() if n in computed or n[0] != "/"},
                computed,
                dtype=dtype_of(self.model),
                told=f"batch {number} gives other numbers than those stored in {store.folder}",
                reason="so hooks, loss or weights are not those of the stored run (or, in bfloat16 "
                "or float16, a question was added or left out that makes all passes have hooks)",
            )
        if store.differ and ends:
            told = "; ".join(store.differ.values())
            warn_user(f"what {store.folder} holds is believed although this differs: {told}")


@dataclass
class PartsThatFit:
    """Computes contributions of batches in the largest parts that fit into memory."""

    contributions_of: Callable[[PromptBatch, Sequence[str]], Mapping[str, Tensor]]
    size: int | None = None  # prompts in a part; None for whole batches

    def contributions(
        self,
        batch: PromptBatch,
        names: Sequence[str] = (),
        after_part: Callable[[int], object] = lambda count: None,
    ) -> dict[str, Tensor]:
        """The contributions of all prompts of a batch to these names, in their order."""
        parts: list[Mapping[str, Tensor]] = []
        done, count = 0, len(batch.tokens)
        while done < count:
            size = count if self.size is None else self.size
            part = batch if size >= count else batch.prompts(done, done + size)
            contributions = None
            try:
                contributions = self.contributions_of(part, names)
            except Exception as error:
                check_out_of_memory(error, part)
            if contributions is None:  # after the except block, whose error holds tensors
                free_memory()
                self.size = half_of(part)
            else:
                parts.append(contributions)
                done += size
                after_part(len(part.tokens))
        return dict(parts[0]) if len(parts) == 1 else joined(parts)


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What all parts contribute, without metrics whose names or shapes differ between parts."""
    shapes = [{name: values.shape[1:] for name, values in part.items()} for part in parts]
    metrics = {name: name.partition("/")[0] for part in parts for name in part}
    different = {
        metric
        for name, metric in metrics.items()
        if any(of_part.get(name) != shapes[0].get(name) for of_part in shapes)
    }
    complete = [name for name, metric in metrics.items() if metric not in different]
    return {name: torch.cat([part[name] for part in parts]) for name in complete}


def in_order(
    batches: Sequence[PromptBatch], parts: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """What all batches contribute, by the index of their queries."""
    order = order_of_queries(batches)
    return {name: values[order] for name, values in joined(parts).items()}


def describe_layers(model: HookedModel) -> dict[str, Any]:
    """The layers without a pattern, in which records have NaN, if the model has some."""
    others = layers_without_pattern(model)
    return {WITHOUT_PATTERN: others, "n_layers": model.cfg.n_layers} if others else {}


def describe_prompts(batches: Sequence[PromptBatch]) -> dict[str, Any]:
    ids = torch.cat([batch.demonstrations_id for batch in batches])
    verbalizer = batches[0].verbalizer
    is_plain = verbalizer is None or verbalizer.has_one_word_a_class
    names = batches[0].segment_names
    return {
        "labels": [label.strip() for label in batches[0].labels] or None,
        **({} if is_plain else {"verbalizer": repr(verbalizer)}),
        **({} if names == SEGMENTS else {"segments": names}),
        "prompts": len(ids),
        "demonstration_sets": len(ids.unique()),
    }


def checked_batches(model: HookedModel, batches: Sequence[PromptBatch]) -> list[PromptBatch]:
    """The batches as they are run, or an error; the model is prepared if it was not.

    They are padded on the right, because some models count positions by columns (Llama 4).
    """
    ensure_prepared(model)
    require_batches(batches)
    check_prompts(*batches)
    check_fits(model, *batches)
    check_media_tokens(model, *batches)
    for batch in batches:
        if batch.verbalizer != batches[0].verbalizer:
            raise PromptError(
                "the batches of one run must have the same label words; run each task by itself"
            )
        if batch.segment_names != batches[0].segment_names:
            raise PromptError(
                "the batches of one run must have the same segments; got "
                f"{batches[0].segment_names} and {batch.segment_names}"
            )
    return [batch.padded_right() for batch in batches]


def require_batches(batches: Sequence[PromptBatch]) -> None:
    """Raise an error unless there is a batch, and none twice."""
    if not batches:
        raise PromptError("there are no batches to run")
    if len({id(batch) for batch in batches}) < len(batches):
        raise PromptError(
            "a batch is in the list twice, so that its prompts would count twice and intervals be "
            "too narrow; give each batch once"
        )


def order_of_queries(batches: Sequence[PromptBatch]) -> Int[Tensor, " prompt"]:
    """The order that sorts the contributions of all batches by the index of their queries.

    Of several calls, where an index occurs twice, by set of demonstrations, as sets appear, by
    call, and by index; another call begins where an index of a set occurs again.
    """
    indices = torch.cat([batch.index for batch in batches]).tolist()
    if len(set(indices)) == len(indices):
        return torch.tensor(indices, device="cpu").argsort()
    sets = [batch.demonstrations_id.tolist() for batch in batches]
    rank = {name: number for number, name in enumerate(dict.fromkeys(chain(*sets)))}
    calls: Counter[int] = Counter()
    seen: set[tuple[int, int, int]] = set()
    keys: list[tuple[int, int, int]] = []
    for batch, names in zip(batches, sets, strict=True):
        prompts = list(zip(names, batch.index.tolist(), strict=True))
        for name in {name for name, index in prompts if (name, calls[name], index) in seen}:
            calls[name] += 1
        seen.update((name, calls[name], index) for name, index in prompts)
        keys += [(rank[name], calls[name], index) for name, index in prompts]
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), device="cpu")


def cases_of(
    batches: Sequence[PromptBatch],
) -> tuple[Int[Tensor, " prompt"], Int[Tensor, " prompt"]]:
    """The set of demonstrations and the text of each prompt, in the order of the contributions."""
    order = order_of_queries(batches)
    sets = torch.cat([batch.demonstrations_id for batch in batches])
    # What else a prompt has, such as an image, may differ where tokens do not.
    texts = [
        batch.index if batch.inputs else digests(batch, batch.attention_mask) for batch in batches
    ]
    return sets[order], torch.cat(texts)[order]
