"""Every number of every record that the package gives, to compare one state of it with another.

Tiny models in float64, on one set of demonstrations and on three equal sets, in each way in which
prompts run. A number has a name such as ``gpt2.one.shared.metrics.accuracy.intervals.accuracy``:
the model, the sets, the way, the call, and where it is in what the call returned.

    python -m tests.support.same_numbers --store FILE
    python -m tests.support.same_numbers --compare FILE [--exact] [--only 'gpt2.several.*' ...]

The first writes the numbers of this state; the second computes them again and prints each that
differs. On one machine a change that should keep all numbers keeps them bit for bit: ``--exact``,
with ``OMP_NUM_THREADS=1``. ``--only`` takes calls by patterns of their names or groups, and
``--texts`` compares texts too, such as reasons of verdicts. ``--suite`` takes the calls whose
numbers tests/results/test_same_numbers.py compares with those in same_numbers.safetensors; where a
number changes on purpose, ``--suite --store tests/support/same_numbers.safetensors`` writes them
again.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import anchorlens as al
from anchorlens.runs import way as decision
from tests.support import tiny_models
from tests.support.asked import ask, by_site
from tests.support.printed_code import printed

STORED = Path(__file__).with_suffix(".safetensors")
MODELS, SETS = ("gpt2", "llama", "gemma3"), {"one": 1, "several": 3}
PROMPTS = 12  # after each set of demonstrations: at least 10, so that several sets are given ones
# What is no number of the code, and what other machines or versions change.
LEFT_OUT = {"seconds", "whole_seconds", "versions", "model"}
TOLERANCE = 1e-9


class Numbers(NamedTuple):
    """What was computed, by name."""

    tensors: dict[str, Tensor]
    texts: dict[str, str]


class Scene(NamedTuple):
    """What the calls get."""

    model: Any
    batches: list[al.PromptBatch]  # the queries have mostly the labels that the model answers
    others: list[al.PromptBatch]  # the same sets of demonstrations with other queries
    written: list[al.PromptBatch]  # prompts of named segments, each with the model's own answer

    @property
    def first(self) -> list[al.PromptBatch]:
        """A batch of each set of demonstrations, for what takes many passes."""
        ids = [int(batch.demonstrations_id[0]) for batch in self.batches]
        return [self.batches[ids.index(each)] for each in dict.fromkeys(ids)]


def all_calls() -> list[str]:
    """The names of all calls, each in its group: the model, the sets and the way."""
    # Whole prompts; after shared tokens, as by default; and with the attention of long prompts.
    of_ways = {"whole": WHOLE, "shared": CALLS, "long": CALLS}
    return [
        f"{model}.{sets}.{way}.{call}"
        for model in MODELS
        for sets in SETS
        for way, calls in of_ways.items()
        for call in calls
    ]


def matching(patterns: Sequence[str]) -> list[str]:
    """The calls whose name, or the name of whose group, fits a pattern."""
    return [
        call
        for call in all_calls()
        if any(fnmatch(name, each) for each in patterns for name in (call, group_of(call)))
    ]


def group_of(name: str) -> str:
    return ".".join(name.split(".")[:3])


def call_of(name: str) -> str:
    return ".".join(name.split(".")[:4])


def numbers_of(calls: Sequence[str]) -> Numbers:
    """All numbers of some calls."""
    found = Numbers({}, {})
    for name in calls:
        model, sets, way, call = name.split(".")
        function = (WHOLE if way == "whole" else CALLS)[call]
        with (
            patch.object(decision, "LARGE", 0) if way == "long" else nullcontext(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                add(found, name, function(scene_of(model, sets)))
            except Exception as error:  # the other calls are compared anyhow
                found.texts[f"{name}.error"] = repr(error)
    return found


def add(found: Numbers, name: str, value: Any) -> None:
    """Put all numbers and texts of a value under a name."""
    if isinstance(value, Tensor):
        found.tensors[name] = value.detach().cpu().contiguous().clone()
    elif isinstance(value, float):
        found.tensors[name] = torch.tensor(value, dtype=torch.double)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key not in LEFT_OUT:
                add(found, f"{name}.{key}", each)
    elif is_dataclass(value):
        found.texts[f"{name}.class"] = type(value).__name__
        add(found, name, {each.name: getattr(value, each.name) for each in fields(value)})
    elif isinstance(value, list | tuple) and are_numbers(value):
        add(found, name, torch.tensor(value, dtype=torch.double))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            add(found, f"{name}.{number}", each)
    else:
        found.texts[name] = str(value)


def are_numbers(values: Any) -> bool:
    """Whether a list, also one of lists, has floats, as in ``info["of_sets"]``."""
    if isinstance(values, list | tuple):
        return bool(values) and all(are_numbers(each) for each in values)
    return isinstance(values, float)


@cache
def hooked(name: str) -> Any:
    kind = "byte_level" if name == "gpt2" else "sentencepiece_like"
    tokenizer = getattr(tiny_models, f"{kind}_tokenizer")()
    weights = getattr(tiny_models, f"tiny_{name}")(len(tokenizer)).double()
    return al.load_model(weights, tokenizer=tokenizer)


@cache
def scene_of(name: str, sets: str) -> Scene:
    model, examples = hooked(name), al.load_examples("questions")
    prompts = partial(al.build_prompts, model.tokenizer, al.TASKS["trec"], batch_size=6)
    batches, others = [], []
    for seed in range(SETS[sets]):
        demos = al.sample_demonstrations(examples, seed=seed)
        queries = [example for example in examples if example not in demos][seed:]
        asked, held_out = queries[:PROMPTS], queries[PROMPTS : 2 * PROMPTS]
        # With labels that a random model answers, verdicts are about its numbers.
        logits = al.target_logits(model, prompts(demos, asked), progress=False)
        answers = logits[:, prompts(demos, asked)[0].label_token_ids].argmax(1).tolist()
        answered = [
            query if number % 4 == 0 else replace(query, label=answers[number])
            for number, query in enumerate(asked)
        ]
        batches += prompts(demos, answered)
        others += prompts(demos, held_out)
    asked = examples[:3]
    pieces = [[("question", each.text), ("fact", f" {each.text[::-1]}")] for each in asked]
    written = [al.trace_generation(model, each, max_new_tokens=3).batch for each in pieces]
    return Scene(model, batches, others, written)


def metrics() -> list[al.Metric]:
    """Every metric that runs in all ways, and options that change what is in a record."""
    two = {"labels": al.edges.anchors, "target": al.edges.target}
    return [
        *(al.SaliencyFlows(), al.AttentionAUCROC(), al.Accuracy(), al.AnchorDistances(3)),
        al.SaliencyFlows(
            edges={"tq": al.edges.tq, "rest": al.edges.ww},
            weight=al.weights.saliency_of_heads,
            name="own_flows",
        ),
        *(al.LabelHeads(draws=2), al.SegmentAttention(["text", "label", "target"], apart=1)),
        *(al.SegmentFlows(), al.SegmentFlows(two, weight=al.weights.signed, name="signed")),
        al.SegmentFlows(weight=al.weights.value_norm, name="value_norm"),
    ]


def run(scene: Scene, *given: al.Question, **more: Any) -> Any:
    results = al.run(scene.model, scene.batches, given, **QUIET | more)
    return {"records": results, "claims": al.claims(results)}


def isolated(scene: Scene, **more: Any) -> Any:
    hooks = partial(al.isolate_labels, scene.model, site=0)
    given = al.Loyalty(), al.Accuracy(), al.SaliencyFlows(), al.AttentionAUCROC()
    return run(scene, *given, hooks=hooks, **more)


def answers(scene: Scene, **more: Any) -> Any:
    loss = al.losses.span_cross_entropy(ANSWER)
    return al.run(scene.model, scene.written, [al.SegmentFlows()], loss=loss, **QUIET | more)


def attribution(scene: Scene) -> Any:
    methods: Any = [
        (al.subsets.one_by_one, al.removal.edges, None),
        (al.subsets.shapley(), al.removal.text, ["text", "label", "query"]),
        (al.subsets.lasso(6), al.removal.edges, al.edges.each_demonstration(scene.first[0])),
    ]
    return [
        ask(
            scene.model,
            scene.first,
            al.SegmentAttribution(method, remove=remove, segments=segments),
            **QUIET,
        )
        for method, remove, segments in methods
    ]


def diagnosis(scene: Scene) -> Any:
    results = al.run(scene.model, scene.batches, [al.AnchorDistances(3)], **QUIET)
    return al.diagnose(results["anchor_distances"])


def analysis(scene: Scene) -> Any:
    """With random models where they take little time."""
    with_random = scene.model.cfg.n_heads == 2
    results = al.analyse(
        scene.model, scene.batches, depth=1, draws=2, random_weights=with_random, **QUIET
    )
    judged = al.claims(results)
    isolation = results.pop("isolation")
    return {"records": {**results, **of_sites(isolation)}, "claims": judged}


def accuracies(scene: Scene) -> Any:
    changes = {"clean": None, "isolated": partial(al.isolate_labels, scene.model, site=range(3))}
    correct = {
        name: al.run(scene.model, scene.batches, [al.Accuracy()], hooks=hooks, **QUIET)[
            "accuracy"
        ].correct
        for name, hooks in changes.items()
    }
    sets = torch.cat([batch.demonstrations_id for batch in scene.batches])
    return al.metrics.compare_accuracies(correct, sets=sets, resamples=RESAMPLES)


def caches(scene: Scene) -> Any:
    given: list[al.Metric] = [al.AttentionAUCROC(), al.AnchorDistances(3), al.Accuracy()]
    names = al.caches.names_filter(given, scene.model, scene.batches[0])
    passes = (
        scene.model.run_with_cache(
            batch.tokens, attention_mask=batch.attention_mask, names_filter=names
        )
        for batch in scene.batches
    )
    return al.caches.from_caches(
        given, scene.batches, passes, model=scene.model, resamples=RESAMPLES
    )


def text_of_a_prompt(scene: Scene) -> Any:
    hard_prompts = al.contexts.hard_prompts
    given: dict[str, Any] = {"held_out": scene.batches, "tokenizer": scene.model.tokenizer}
    found = hard_prompts.of_tokens(scene.model, [5, 6], **given)
    text = hard_prompts.of_text(scene.model, found, **given)
    random = hard_prompts.random(scene.model, length=len(text.ids), draws=2, **given)
    contexts = {"nothing": al.contexts.NoContext(), "text": text}
    asked = al.ContextComparison(contexts, random=random, repeats=0)
    return ask(scene.model, scene.batches, asked, **QUIET)


def across_models(scene: Scene) -> Any:
    options: dict[str, Any] = {"depth": 1, "draws": 1, "random_weights": False}
    return al.replication.across_models(
        {"one": scene.model}, lambda tokenizer: scene.batches, **options, **QUIET
    )


def contexts(scene: Scene) -> Any:
    compared: dict[str, Any] = {
        "demonstrations": al.compress,
        "words": partial(al.compress, select=al.contexts.selection.label_words),
        "none": al.contexts.NoContext(),
    }
    return ask(
        scene.model, scene.batches, al.ContextComparison(compared, draws=2, repeats=1), **QUIET
    )


def effect_of_a_context(scene: Scene) -> Any:
    """After the demonstrations of the first set."""
    context = al.compress(scene.model, scene.batches[0].prompt(0))
    set_id = int(scene.batches[0].demonstrations_id[0])
    prompts = [each for each in scene.others if int(each.demonstrations_id[0]) == set_id]
    return ask(scene.model, prompts, al.PrefixEffect(context=context), **QUIET)


def cut_edges(scene: Scene) -> Any:
    more: dict[str, Any] = {"control": al.edges.random_edges, "draws": 2}
    asked = [al.Accuracy(), al.SegmentAttention(), al.EdgeSweep(al.edges.tq, SITES, **more)]
    results = al.run(scene.model, scene.batches, asked, **QUIET)
    sweep = results.pop("edge_sweep")
    return {**results, **of_sites(sweep)}


def faithfulness(scene: Scene) -> Any:
    scores: Any = {"signed": al.SegmentFlows(weight=al.weights.helpful)}
    scores["without each"] = al.subsets.one_by_one
    return ask(scene.model, scene.batches, al.Faithfulness(scores, subsets=8), **QUIET)


def suppression(scene: Scene, batches: list[al.PromptBatch]) -> Any:
    """The question of the documentation."""
    asked = printed("experiments.md", "Suppression")(tuple(batches[0].segment_names))
    return ask(scene.model, batches, asked, **QUIET)


def of_answers(question: Callable[..., al.Question], **more: Any) -> Callable[[Scene], Any]:
    asked = question(segments=PIECES, answer=ANSWER, **more)
    return lambda s: ask(s.model, s.written, asked, **QUIET)


def isolation(scene: Scene) -> Any:
    def asked(sites: Any, **more: Any) -> Any:
        return of_sites(ask(scene.model, scene.batches, ISOLATION(sites, **more), **QUIET))

    first = {"isolated": al.Site(0)}
    return {
        "sweep": asked(SITES, draws=2),
        "three draws": asked(first, draws=3)["isolated"],
        "whole words": asked(first, draws=1, whole_words=True)["isolated"],
    }


def of_sites(record: Any) -> Any:
    """The numbers at each site."""
    return {
        name: {
            "class": type(record).__name__,
            **each.tensors(),
            "intervals": each.intervals,
            "info": each.info,
        }
        for name, each in by_site(record).items()
    }


# Every call and every way. The other models are left out: transformers computes their softmax and
# rotary positions in float32 whatever the model's type, so that they differ between machines.
IN_SUITE = [
    *("gpt2.one.whole.isolated", "gpt2.one.whole.patterns", "gpt2.one.whole.c*"),
    *("gpt2.one.shared.an*", "gpt2.one.shared.at*", "gpt2.one.shared.across models"),
    *(
        "gpt2.one.shared.cut edges",
        "gpt2.one.shared.[efs]*",
        "gpt2.one.shared.tr*",
        "gpt2.one.shared.text*",
    ),
    *("gpt2.one.long.answers", "gpt2.one.long.isolated"),
    *("gpt2.several.shared.[dhim]*", "gpt2.several.shared.accuracies"),
    *("gpt2.several.shared.contexts", "gpt2.several.shared.task vectors"),
]
RESAMPLES = 20
QUIET: dict[str, Any] = {"resamples": RESAMPLES, "progress": False}
ISOLATION = al.EdgeSweep.isolation
SITES = {"first": al.Site(0), "rest": al.Site([1, 2])}
PIECES, ANSWER = ["question", "fact"], "answer"


def dependence(s: Scene) -> Any:
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=1)
    queries = [example for example in examples if example not in demos][:PROMPTS]
    labels = {
        "gold": al.relabeling.gold,
        "random": al.relabeling.random(),
        "flipped": al.relabeling.flipped(),
    }
    return al.label_dependence(s.model, al.TASKS["trec"], demos, queries, labels, **QUIET)


def heads_of_demonstrations(s: Scene) -> Any:
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=1)
    queries = [example for example in examples if example not in demos][:PROMPTS]
    build = partial(al.build_prompts, s.model.tokenizer, al.TASKS["trec"], demos)
    record = al.retrieval_heads(s.model, build(queries), build(["N/A"] * PROMPTS), **QUIET)
    return record, al.run(s.model, s.first, [record.masking(2, draws=2)], **QUIET)


# What can be told to run whole prompts, or does so always.
WHOLE: dict[str, Callable[[Scene], Any]] = {
    "metrics": lambda s: run(s, *metrics(), share_prefix=False),
    "isolated": lambda s: isolated(s, share_prefix=False),
    "answers": lambda s: answers(s, share_prefix=False),
    "patterns": lambda s: run(s, al.SegmentRollout(), al.PrefixEffect()),
    "no intervals": lambda s: run(s, *metrics(), resamples=0),
    "checkpoints": lambda s: run(s, al.SaliencyFlows(), gradient_checkpointing=True),
    "caches": caches,
}
CALLS: dict[str, Callable[[Scene], Any]] = {
    "metrics": lambda s: run(s, *metrics()),
    **{"isolated": isolated, "answers": answers, "isolation": isolation, "cut edges": cut_edges},
    **{"faithfulness": faithfulness, "attribution": attribution},
    "faithfulness of answers": of_answers(al.Faithfulness, subsets=3),
    "attribution of answers": of_answers(al.SegmentAttribution),
    "head effects": lambda s: al.head_effects(s.model, s.others, s.batches, **QUIET),
    "task vectors": lambda s: al.task_vectors(s.model, s.others, s.batches, **QUIET),
    "integrated": lambda s: ask(s.model, s.first, al.IntegratedFlows(steps=2), **QUIET),
    "steps": lambda s: al.step_flows(s.model, s.written[0].prompt(0), ANSWER),
    "trace": lambda s: al.trace_generation(s.model, "Who wrote it?", max_new_tokens=3).flows,
    "suppression": lambda s: suppression(s, s.first),
    "suppression of answers": lambda s: suppression(s, s.written),
    **{
        "dependence on labels": dependence,
        "heads of demonstrations": heads_of_demonstrations,
        "diagnosis": diagnosis,
        "analysis": analysis,
        "accuracies": accuracies,
    },
    "effect of a context": effect_of_a_context,
    **{"contexts": contexts, "text of a prompt": text_of_a_prompt, "across models": across_models},
}


def store(found: Numbers, path: Path) -> None:
    save_file(found.tensors, path, {"texts": json.dumps(found.texts, sort_keys=True)})


def stored(path: Path) -> Numbers:
    with safe_open(path, "pt") as file:
        texts = json.loads(file.metadata()["texts"])
        return Numbers({name: file.get_tensor(name) for name in file.keys()}, texts)  # noqa: SIM118


def of_calls(found: Numbers, calls: Sequence[str]) -> Numbers:
    """The part of the numbers that is of these calls."""
    wanted = set(calls)
    return Numbers(
        {name: each for name, each in found.tensors.items() if call_of(name) in wanted},
        {name: each for name, each in found.texts.items() if call_of(name) in wanted},
    )


def differences(
    ours: Numbers, theirs: Numbers, tolerance: float, texts: Callable[[str], bool]
) -> Iterator[str]:
    """A line for each name that only one has, and for each number or text that differs.

    Numbers differ at most by ``tolerance`` times the sum of: the number, a hundredth of the largest
    of their tensor, and 1e-5. With 0 they are equal bit for bit.
    """
    of_kinds = (ours.tensors, theirs.tensors), (ours.texts, theirs.texts)
    for mine, others in ((set[str](a), set[str](b)) for a, b in of_kinds):
        missing, new = others - mine, mine - others
        yield from (f"{name}: is missing" for name in sorted(missing))
        yield from (f"{name}: is new" for name in sorted(new))
    for name in sorted(ours.tensors.keys() & theirs.tensors.keys()):
        if difference := _difference(ours.tensors[name], theirs.tensors[name], tolerance):
            yield f"{name}: {difference}"
    for name in sorted(ours.texts.keys() & theirs.texts.keys()):
        if texts(name) and ours.texts[name] != theirs.texts[name]:
            yield f"{name}: {ours.texts[name]!r}, not {theirs.texts[name]!r}"


def _difference(ours: Tensor, theirs: Tensor, tolerance: float) -> str:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype} {[*ours.shape]}, not {theirs.dtype} {[*theirs.shape]}"
    if ours.numpy().tobytes() == theirs.numpy().tobytes():
        return ""
    ours, theirs = ours.double(), theirs.double()
    finite = ours.isfinite() & theirs.isfinite()
    strange = int((~finite & ~torch.isclose(ours, theirs, 0, 0, equal_nan=True)).sum())
    distance = (ours - theirs).abs().masked_fill(~finite, 0)
    sizes = theirs.abs().masked_fill(~finite, 0)
    allowed = tolerance * (sizes + sizes.amax() / 100 + 1e-5)
    too_far = (distance > allowed) if tolerance else (ours != theirs) & finite
    if not strange and not too_far.any() and tolerance:
        return ""
    relative = float((distance / sizes.clamp(min=1e-300)).max())
    return (
        f"{int(too_far.sum())} of {ours.numel()} numbers differ, by {float(distance.max()):.2g} "
        f"at most ({relative:.2g} of the number); {strange} are NaN or infinite in one only"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--store", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--exact", action="store_true", help="bit for bit")
    parser.add_argument("--texts", action="store_true", help="texts too, not verdicts alone")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--suite", dest="only", action="store_const", const=IN_SUITE)
    given = parser.parse_args()
    calls = matching(given.only)
    found = numbers_of(calls)
    if given.store:
        store(found, given.store)
        print(f"{len(found.tensors)} tensors and {len(found.texts)} texts of {len(calls)} calls")
    if not given.compare:
        return 0
    expected = of_calls(stored(given.compare), calls)
    tolerance = 0.0 if given.exact else TOLERANCE
    lines = [*differences(found, expected, tolerance, texts=lambda n: given.texts or is_verdict(n))]
    print(*lines, sep="\n")
    print(f"{len(lines)} differences in {len(expected.tensors)} tensors of {len(calls)} calls")
    return int(bool(lines))


def is_verdict(name: str) -> bool:
    return name.endswith(".verdict")


if __name__ == "__main__":
    sys.exit(main())
