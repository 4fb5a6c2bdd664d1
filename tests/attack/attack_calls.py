"""Valid calls of the functions that run a model or read a file, and wrong values for parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

import anchorlens as al
from tests.attack.attack_scene import (
    INF,
    NAN,
    QUICK,
    QUIET,
    odd_batches,
    odd_hooks,
    odd_losses,
    odd_models,
    odd_options,
    scene,
)


@dataclass(frozen=True)
class Call:
    """A valid call, and wrong values for its parameters."""

    function: Callable[..., Any]
    right: dict[str, Any]
    wrong: dict[str, list[Any]]


def isolated(
    model: Any, batches: Any, sites: Any, draws: Any, resamples: Any, progress: bool
) -> Any:
    question = al.EdgeSweep.isolation(sites, draws=draws)
    return al.run(model, batches, [question], resamples=resamples, progress=progress)


def swept(
    model: Any,
    batches: Any,
    edges: Any,
    sites: Any,
    control: Any,
    draws: Any,
    resamples: Any,
    progress: bool,
) -> Any:
    question = al.EdgeSweep(edges, sites, control=control, draws=draws)
    return al.run(model, batches, [question], resamples=resamples, progress=progress)


def compared(
    model: Any,
    batches: Any,
    contexts: Any,
    draws: Any,
    repeats: Any,
    resamples: Any,
    progress: bool,
) -> Any:
    question = al.ContextComparison(contexts, draws=draws, repeats=repeats)
    return al.run(model, batches, [question], resamples=resamples, progress=progress)


LAYERS: list[Any] = [99, -99, [0, 99], [], range(0)]
HEADS: list[Any] = [99, -99, [0, 99], []]
COUNTS: list[Any] = [-1, -100]


def calls() -> list[Call]:
    """Calls of public functions, but for values that are refused with words in other tests.

    These are tests/prompts, tests/metrics/test_loyalty.py and tests/test_refusals.py.
    """
    setup = scene()
    model, batch, batches = setup.model, setup.batch, setup.batches
    both: dict[str, Any] = {"model": model, "batch": batch}
    all_of: dict[str, Any] = {"model": model, "batches": batches}
    bad, models = odd_batches(batch), odd_models()
    wrong_labels = [odd for odd in bad if odd.label_positions is not batch.label_positions]
    bad_lists: list[Any] = [[odd] for odd in bad] + [[], batch, [None], [batch, bad[0]]]
    edges = al.edges.wp(batch)
    record_class = al.records.SaliencyFlowsRecord
    examples: list[Any] = [[], [al.Example("x")], [al.Example("x", -1)], [al.Example("x", 7)]]
    sizes: list[Any] = [0, *COUNTS]
    sites = [*LAYERS, *(al.Site(0, heads=heads) for heads in HEADS), al.Site(0, keep_bos=True)]
    named_sites = [{}, *({"x": al.Site(value)} for value in LAYERS), {3: al.Site([0])}]
    at = {"model": models, "site": sites}
    vector = torch.zeros(3)
    hooks = odd_hooks()
    first = al.EdgeSweep.isolation({"first": al.Site(0)}, draws=1)
    # A loss of other arguments raises a TypeError of its own.
    of_two_arguments = [
        loss for loss in odd_losses() if callable(loss) and len(signature(loss).parameters) == 2
    ]
    return [
        Call(
            al.sample_demonstrations,
            {"examples": setup.examples, "shots": 1, "seed": 0},
            {"examples": examples, "shots": [0, 10_000, *COUNTS]},
        ),
        Call(
            al.sample_queries,
            {"examples": setup.examples, "count": 2, "seed": 0, "exclude": ()},
            {"examples": [[]], "count": [10_000, *COUNTS], "exclude": [setup.examples]},
        ),
        Call(
            al.load_examples,
            {"source": setup.data, "text": "text", "label": "label", "classes": None},
            {
                "source": ["no.jsonl", setup.folder / "x.csv", "x.parquet", "\0.jsonl"],
                "split": ["train", "nope"],
                "text": ["nope", "", "label"],
                "label": ["nope", "", "text"],
                "classes": [[], [5, 6], ["a"]],
            },
        ),
        Call(
            al.load_model,
            {"source": setup.folder},
            {"source": [setup.folder, "x.gguf", setup.data]},
        ),
        Call(al.prepare_model, {"model": model}, {"model": models}),
        Call(
            al.run,
            {**all_of, "questions": [al.Accuracy()], **QUICK},
            {
                "model": models,
                "batches": bad_lists,
                "questions": [
                    *([], [al.Accuracy(), al.Accuracy()], [al.Accuracy], [None], "accuracy"),
                    *([first, first], [first, al.EdgeSweep], [al.Accuracy("isolation"), first]),
                ],
                "hooks": hooks,
                "resamples": COUNTS,
                "gradient_checkpointing": [True],
                "folder": [setup.data, "\0"],
            },
        ),
        Call(
            al.run,
            {**all_of, "questions": [al.SaliencyFlows()], **QUICK},
            {
                "batches": bad_lists,
                "loss": odd_losses(),
                "hooks": hooks,
                "questions": odd_options(),
            },
        ),
        Call(
            al.run,
            {**all_of, "questions": [al.AttentionAUCROC(), al.AnchorDistances(2)], **QUICK},
            {"batches": bad_lists},
        ),
        Call(
            al.run,
            {**all_of, "questions": [al.Accuracy(), first], **QUICK},
            {"batches": bad_lists, "hooks": [lambda batch: al.isolate_labels(model, batch, 0)]},
        ),
        Call(
            al.target_logits,
            {**all_of, **QUIET},
            {"model": models, "batches": bad_lists, "hooks": hooks},
        ),
        Call(
            al.saliency,
            {**both},
            {"model": models, "batch": bad, "loss": odd_losses()},
        ),
        Call(
            al.block_edges,
            {**both, "edges": al.edges.wp, "site": 0},
            {**at, "edges": [torch.ones_like(edges), edges.float(), edges[0], edges.long()]},
        ),
        Call(
            al.scale_edges,
            {**both, "edges": edges, "factor": 0.5, "site": [0]},
            {
                **at,
                "edges": [edges.float(), edges[0], edges.long()],
                "factor": [-1.0, NAN, INF, "x", None, True, vector, torch.ones(3, 2) * NAN],
            },
        ),
        Call(al.detach_heads, {"model": model, "site": al.Site(0, heads=0)}, at),
        Call(
            al.edges.at,
            {"batch": batch, "positions": batch.label_positions},
            {"positions": [batch.label_positions - 999, vector, vector[None]]},
        ),
        Call(al.isolate_labels, {**both, "site": 0}, {**at, "batch": wrong_labels}),
        Call(
            al.hooks.isolate_random,
            {**both, "site": 0, "seed": 0},
            {**at, "seed": ["x", 1.5, NAN], "batch": wrong_labels},
        ),
        Call(
            al.reweight_anchors,
            {**both, "beta": setup.beta},
            {
                "model": models,
                "batch": wrong_labels,
                "beta": [vector, torch.zeros(3, 2, 99), setup.beta.beta * NAN],
            },
        ),
        Call(
            al.contexts.train_reweighting,
            {**all_of, "training": al.contexts.Training(steps=1, **QUIET), "start": None},
            {
                "batches": bad_lists,
                "training": [
                    al.contexts.Training(optimizer=torch.optim.LBFGS),
                    al.contexts.Training(optimizer=lambda parameters: None),  # type: ignore[arg-type, return-value]
                    al.contexts.Training(folder="a\0b"),
                    *(
                        al.contexts.Training(steps=1, loss=loss, **QUIET)
                        for loss in of_two_arguments
                    ),
                ],
                "start": [vector, torch.zeros(3, 2, 99)],
            },
        ),
        Call(
            al.contexts.Training,
            {"steps": 1, "check_every": 1, "clip": 1.0, "seed": 0},
            {
                **{"steps": COUNTS, "check_every": sizes, "clip": [NAN, 0.0, "x"]},
                **{"seed": ["x", 0.5], "loss": ["loss", 3]},
            },
        ),
        Call(
            isolated,
            {**all_of, "sites": {"first": al.Site([0])}, "draws": 1, **QUICK},
            {
                "model": models,
                **{"batches": bad_lists, "draws": sizes, "resamples": COUNTS},
                "sites": [*named_sites, {"x": al.Site([0], keep_bos=True)}],
            },
        ),
        Call(
            swept,
            {
                **{**all_of, "edges": al.edges.pq, "sites": {"first": al.Site([0])}},
                **{"control": al.edges.random_keys, "draws": 1, **QUICK},
            },
            {
                "batches": bad_lists,
                "edges": [None, edges, lambda batch: None, lambda batch: batch.tokens],
                "control": [None, edges, lambda *_: None, lambda batch, *_: batch.tokens],
                "sites": named_sites,
                "draws": sizes,
            },
        ),
        Call(
            al.sites.first_and_last,
            {"model": model, "depths": [1]},
            {"depths": [[0], [99], [-1], [1.5]]},
        ),
        Call(al.sites.windows, {"model": model, "width": 1}, {"width": [0, 99, *COUNTS]}),
        Call(al.sites.single_heads, {"model": model, "layers": [0]}, {"layers": LAYERS}),
        Call(
            al.compress,
            {"model": model, "demonstrations": batch, "select": al.contexts.selection.label_words},
            {
                "demonstrations": bad,
                "select": [
                    lambda prompt: torch.zeros(prompt.tokens.shape[1], dtype=torch.bool),
                    lambda prompt: torch.ones(3, dtype=torch.bool),
                    lambda prompt: prompt.tokens[0],
                    lambda prompt: None,
                    "label_words",
                ],
                "positions": [
                    lambda selected: (torch.zeros(1), 1),
                    lambda selected: (torch.arange(int(selected.sum())) - 5, 3),
                    lambda selected: (torch.arange(int(selected.sum())), -3),
                    lambda selected: (torch.arange(int(selected.sum())), 10_000),
                    lambda selected: None,
                ],
            },
        ),
        Call(
            setup.context.logits,
            {"model": model, "batch": batch},
            {"model": models, "batch": bad},
        ),
        Call(
            al.contexts.reweight_demonstrations,
            {"model": model, "demonstrations": batch, "beta": torch.zeros(3, 2, 6)},
            {"demonstrations": bad, "beta": [vector, torch.full((3, 2, 6), NAN)]},
        ),
        Call(
            compared,
            {
                **all_of,
                "contexts": {"none": al.contexts.NoContext()},
                "draws": 1,
                "repeats": 1,
                **QUICK,
            },
            {
                "batches": bad_lists,
                "contexts": [{}, [], None, {1: al.contexts.NoContext()}, {"none": 3}],
                "draws": COUNTS,
                "repeats": COUNTS,
                "resamples": COUNTS,
            },
        ),
        Call(
            al.prompts.text_anchor_prompts,
            {
                **{"tokenizer": setup.tokenizer, "task": setup.task, "demonstrations": setup.demos},
                "queries": setup.queries,
            },
            {
                "demonstrations": examples,
                "queries": [[], [al.Example("x", 99)]],
                "batch_size": sizes,
            },
        ),
        Call(
            al.metrics.compare_accuracies,
            {"correct": setup.correct, "resamples": 2},
            {"correct": [{}, {"a": torch.ones(0)}]},
        ),
        Call(
            al.diagnose,
            {"distances": setup.results["anchor_distances"], "layer": None},
            {"layer": [99, -99, 1.5, "x"]},
        ),
        Call(
            record_class.load,
            {"path": setup.results["saliency_flows"].save(setup.folder / "record.safetensors")},
            {"path": [setup.data, setup.folder, setup.folder / "none", "\0"]},
        ),
        Call(
            al.contexts.CompressedContext.load,
            {"path": setup.context.save(setup.folder / "context.safetensors")},
            {"path": [setup.data, setup.folder, setup.folder / "none", "\0"]},
        ),
        Call(
            al.write_report,
            {"results": setup.results, "path": setup.folder / "report.html"},
            {"results": [{}], "path": [setup.folder, setup.folder / "no" / "x.html", "\0"]},
        ),
        Call(
            al.PromptBatch.from_positions,
            {
                **{"tokens": torch.arange(12).reshape(2, 6), "label_positions": [[1, 3], [1, 3]]},
                **{"label_classes": [[0, 1], [1, 0]], "label_token_ids": [5, 6], "gold": [0, 1]},
            },
            {
                "tokens": [torch.zeros(0, 6)],
                "label_classes": [[[0.5, 1], [0, 1]]],
                "label_token_ids": [[5, 5], [], [-1, 5], [0.5, 1.0], [[5, 6]]],
                "gold": [[0.5, 0.1]],
            },
        ),
        Call(batch.prompt, {"number": 0}, {"number": [99, -1, 1.5, "x"]}),
        Call(al.edges.segment, {"batch": batch, "name": "label"}, {"name": ["", "nope"]}),
        Call(
            al.paper,
            {
                "model": model,
                "examples": {"trec": (setup.examples, setup.examples)},
                **{"queries": 2, "seeds": [1], "depth": 1, "draws": 1, **QUIET},
            },
            {
                "examples": [{}, {"nope": (setup.examples,) * 2}, {"trec": ([], [])}],
                **{"queries": sizes, "seeds": [[], ["x"]], "depth": [0, 99, -1], "draws": sizes},
                "parts": [[], [None], ["table 4"]],
            },
        ),
    ]
