"""Prompts that run together, of which some differ from the others in what the package asks of all.

Some are longer than a switch of the model's rotation, some have edges that others have not, and in
some a chat template writes something before the answer. Each prompt must have the numbers that it
has alone, or the prompts are refused. The oracle for rotations is plain transformers.
"""

import copy
import random
from typing import Any

import torch

import anchorlens as al
from anchorlens.errors import AnchorlensError, PromptError
from tests.attack.attack_scene import QUIET, scene
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.measures import difference
from tests.support.plain_prompts import rows
from tests.support.rotary_models import alone, rotating

RUN: dict[str, Any] = {"resamples": 0, **QUIET}
SWITCHES = (45, 55, 65, 75, 90)  # prompts have 40 to 100 tokens


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(["a", "film", "that", "nobody"], k=rng.randint(1, most)))


def built(rng: random.Random, tokenizer: Any, most: int) -> list[al.PromptBatch]:
    """A few prompts of random lengths, with one or two sets of demonstrations."""
    task = al.Task("Review: {text}\nSentiment:{label}", [" Positive", " Negative"])
    count = rng.randint(1, 2)
    demos = [[al.Example(words(rng, most), label) for label in (0, 1)] for _ in range(count)]
    queries = [al.Example(words(rng, most), rng.randrange(2)) for _ in range(rng.randint(2, 6))]
    sets = [rng.choice(demos) for _ in queries]
    side: Any = rng.choice(["left", "right"])
    size = rng.randint(1, 4)
    return al.build_prompts(tokenizer, task, sets, queries, batch_size=size, padding_side=side)


def singles_of(batches: list[al.PromptBatch]) -> list[al.PromptBatch]:
    singles = [batch.prompt(k) for batch in batches for k in range(len(batch))]
    return sorted(singles, key=lambda batch: int(batch.index))


def odd_lengths(rng: random.Random) -> None:
    kind, switch = rng.choice(["longrope"] * 2 + ["dynamic", "yarn"]), rng.choice(SWITCHES)
    model, plain = rotating(kind, switch)
    batches = built(rng, model.tokenizer, most=rng.choice([3, 8, 14]))
    case = f"{kind} {switch}, lengths {[len(row.tokens) for row in rows(batches)]}"
    try:
        logits = al.target_logits(model, batches, **QUIET)
    except AnchorlensError:
        return
    expected = alone(plain, *singles_of(batches))
    assert difference(logits, expected) <= 1e-5, f"{case}: other logits than alone"
    for batch in batches:
        try:
            context = al.compress(model, batch, al.contexts.selection.everything)
            answers = context.logits(model, batch)
        except AnchorlensError:
            continue
        assert difference(answers, expected[batch.index]) <= 1e-5, (
            f"{case}: a context has other logits than the whole prompts"
        )


def odd_edges(rng: random.Random) -> None:
    """Edges of only some prompts, as flows and as cuts, against each prompt alone."""
    setup = scene()
    batches = built(rng, setup.tokenizer, most=8)
    count = sum(map(len, batches))
    chosen = torch.tensor([rng.random() < 0.6 for _ in range(count)])
    kind = rng.choice([al.edges.wp, al.edges.pq, al.edges.tq, al.edges.ww])

    def of_some(batch: al.PromptBatch) -> al.prompts.EdgeSet:
        edges = kind(batch)
        return edges & chosen[batch.index][:, None, None].expand(edges.shape)

    metric = al.SaliencyFlows(edges={"some": of_some, "all": kind})
    singles = singles_of(batches)

    def cut(batch: al.PromptBatch) -> Any:
        return al.block_edges(setup.model, batch, of_some(batch), range(2))

    try:
        flows = al.run(setup.model, batches, [metric], **RUN)["saliency_flows"]
        logits = al.target_logits(setup.model, batches, hooks=cut, **QUIET)
    except AnchorlensError as error:
        if not chosen.any():
            return
        raise AssertionError(f"{count} prompts, edges in {chosen.tolist()}: {error}") from error
    of_all = [al.SaliencyFlows(edges={"all": kind})]
    each = [al.run(setup.model, [one], of_all, **RUN)["saliency_flows"] for one in singles]
    expected = torch.stack([one.flows[:, 0] for one in each])
    case = f"{kind.__name__} in prompts {chosen.nonzero().flatten().tolist()} of {count}"
    assert difference(flows.flows[:, 1], expected.mean(0)) <= 1e-5, f"{case}: other flows of all"
    assert difference(flows.flows[:, 0], expected[chosen].mean(0)) <= 1e-5, (
        f"{case}: other flows of some"
    )
    for one, is_cut, ours in zip(singles, chosen, logits, strict=True):
        hooks = (
            (lambda batch: al.block_edges(setup.model, batch, kind(batch), range(2)))
            if is_cut
            else None
        )
        theirs = al.target_logits(setup.model, [one], hooks=hooks, **QUIET)[0]
        assert difference(ours, theirs) <= 1e-5, f"{case}: other logits with cut edges"


WHEN = ["true", "loop.last", "loop.index0 == 1", "'film' in message.content", "loop.length > 5"]
ODD = ["<|channel|>final", "<think></think>", " ", "\\n", "Answer: "]


def random_template(rng: random.Random) -> str:
    """A template that sometimes writes something before an answer, or where it asks for one."""
    blocks = [
        f"{{% if {rng.choice(WHEN)} %}}{rng.choice(ODD)}{{% endif %}}" if rng.random() < 0.2 else ""
        for _ in range(3)
    ]
    asked = rng.choice(["", "", "", rng.choice(ODD)])
    content = rng.choice(["message.content", "message.content", "message.content | trim"])
    return (
        "{% for message in messages %}<|{{ message.role }}|>"
        f"{blocks[0]}"
        "{% if message.role == 'assistant' %}" + blocks[1] + "{% endif %}"
        f"{{{{ {content} }}}}{blocks[2]}<eos>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>" + asked + "{% endif %}"
    )


def odd_turns(rng: random.Random) -> None:
    """The tokens of each prompt, then those of each answer, are those of the chat template."""
    tokenizer = copy.deepcopy(chat_tokenizer("byte-level"))
    tokenizer.chat_template = random_template(rng)
    labels = ["negative", "positive"]
    task = al.ChatTask("Review: {text}\nSentiment:{label}", labels)
    demos = [al.Example(words(rng, 4), label) for label in (0, 1)]
    queries = [al.Example(words(rng, 4), 0) for _ in range(rng.randint(1, 4))]
    try:
        batches = al.build_prompts(tokenizer, task, demos, queries, batch_size=2)
    except PromptError:
        return
    firsts = batches[0].label_token_ids.tolist()
    thought = tokenizer("<think></think>", add_special_tokens=False)["input_ids"]

    def ids(turns: list[tuple[str, str]], ask: bool) -> list[int]:
        messages = [{"role": role, "content": content} for role, content in turns]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=ask, tokenize=True)
        return list(encoded["input_ids"])

    before = [
        turn
        for demo in demos
        for turn in (
            ("user", f"Review: {demo.text}\nSentiment:"),
            ("assistant", labels[int(demo.label or 0)]),
        )
    ]
    for row, query in zip(rows(batches), queries, strict=True):
        turns = [*before, ("user", f"Review: {query.text}\nSentiment:")]
        assert row.tokens == ids(turns, ask=True), f"other tokens: {tokenizer.chat_template}"
        for word, first in zip(labels, firsts, strict=True):
            answered = ids([*turns, ("assistant", word)], ask=False)
            # A template may ask with an empty thought, which stored answers lack.
            begun = len(row.tokens) - len(thought)
            if row.tokens[begun:] == thought and answered[begun : begun + 1] == [first]:
                continue
            follows = answered[: len(row.tokens) + 1] == [*row.tokens, first]
            assert follows, f"{tokenizer.chat_template}: {word!r} does not follow the prompt"
