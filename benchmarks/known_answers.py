"""Which score may I trust when? Every score on tiny models whose flow is known by construction.

    python benchmarks/known_answers.py --model M

Each model is a GPT-2 of one or two layers whose weights are written here. It answers "y" to one
prompt, and on which segments of the prompt that rests is known. A cell is the share of a score that
is where it belongs: at these segments, and for the answer. A cross says that another segment has as
high a score. The last row is of a real model in which every path from documents to the answer is
cut but that from one of them.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import anchorlens as al

Pieces = Sequence[tuple[str | None, str]]
Cut = Callable[[al.PromptBatch], Sequence[Any]]  # the hooks of a batch

# The residual stream is a sum of one-hot vectors: a word, its place, what heads read, and what is
# answered. Every number also stands with the other sign in a second half, so that the mean is 0.
WORDS = ".?;LMabcdefxyz"  # L and M are long
COUNT, PLACES = len(WORDS), 10
WORD, PLACE, READ, SAID = torch.arange(3 * COUNT + PLACES).split([COUNT, PLACES, COUNT, COUNT])
HALF = 3 * COUNT + PLACES
LONG = 10.0  # the length of L and M
GAIN = 5.0  # of the logit of what is answered
EPSILON = 1e8  # so large that a layer norm multiplies by one number at every position
SURE = 60.0  # a score that takes all attention


def word(letters: str) -> Tensor:
    """The channels of words."""
    return WORD[[WORDS.index(letter) for letter in letters]]


def link(rows: Tensor, columns: Tensor, size: float = 1.0) -> Tensor:
    """A matrix from each row to its column, or from one row to all columns, or the reverse."""
    matrix = torch.zeros(HALF, HALF, dtype=torch.double)
    matrix[rows, columns] = size
    return matrix


class Head(NamedTuple):
    """What it looks at: scores of channels of queries and keys; and what it writes for a key."""

    looks: Tensor
    carries: Tensor


# A head that finds nothing looks at the first token, which is in no segment, and says it by 1e-9:
# no model is hooked in which attention changes nothing.
REST = Head(link(WORD, PLACE[:1], SURE / 3), link(PLACE[:1], SAID[:1], 1e-9))
BEFORE = link(PLACE[1:], PLACE[:-1], SURE)
BEFORE_SECOND = link(PLACE[[2, 4, 6]], PLACE[[1, 3, 5]], SURE)  # every second token
ASKED, LETTERS, ANSWERS = word("?"), word("abcdefxyz"), word("xyz")
TELLS, GATHERS = link(LETTERS, SAID[LETTERS]), link(LETTERS, READ[LETTERS])
NO_VALUES = 0 * TELLS


def asks(keys: Tensor) -> Tensor:
    """The question mark alone looks at these channels."""
    return link(ASKED, keys, SURE)


@dataclass(frozen=True)
class Layer:
    """Two heads, and an MLP: for x, y or z that was read it says the same, from 0 up to 1."""

    first: Head
    second: Head = Head(NO_VALUES, NO_VALUES)
    slope: float = 0.0
    threshold: float = 0.0


@dataclass(frozen=True)
class Known:
    """A model that answers "y" because of some segments of its prompt.

    Attributes:
        prompt: The pieces of its prompt.
        layers: The layers of the model.
        rests_on: The segments on which the answer rests.
        against: Segments that speak for another answer.
        lost: What the log-odds of the answer lose without all that it rests on.
    """

    name: str
    prompt: Pieces
    layers: Sequence[Layer]
    rests_on: Sequence[str] = ("document 2",)
    against: Sequence[str] = ()
    lost: float = GAIN

    @property
    def truth(self) -> Tensor:
        """1 for each segment on which the answer rests, -1 for each against it, 0 for others."""
        names = [name for name, _ in self.prompt if name]
        return torch.tensor([(name in self.rests_on) - (name in self.against) for name in names])

    def weights(self) -> Any:
        """The model of transformers, in float64."""
        config = GPT2Config(
            **{"vocab_size": COUNT, "n_positions": PLACES, "n_embd": 2 * HALF},
            **{"n_layer": len(self.layers), "n_head": 2, "n_inner": 2 * COUNT},
            **{"activation_function": "relu", "layer_norm_epsilon": EPSILON},
            **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0},
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        )
        model = GPT2LMHeadModel(config).double().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(EPSILON**0.5 if "ln_" in name and "weight" in name else 0.0)
            one_hot, body = torch.eye(HALF).double(), model.transformer
            lengths = torch.tensor([LONG if each in "LM" else 1.0 for each in WORDS])
            body.wte.weight.copy_(with_opposite(one_hot[WORD] * lengths[:, None]))
            body.wpe.weight.copy_(with_opposite(one_hot[PLACE]))
            model.lm_head.weight[:, :HALF] = GAIN * one_hot[SAID]
            for block, layer in zip(body.h, self.layers, strict=True):
                write_heads(block.attn, [layer.first, layer.second])
                write_mlp(block.mlp, layer.slope, layer.threshold)
        return model


def with_opposite(matrix: Tensor) -> Tensor:
    return torch.cat([matrix, -matrix], dim=1)


def write_heads(attention: Any, heads: Sequence[Head]) -> None:
    """A query is what the head looks for, and keys and values are the residual stream."""
    queries, keys, values = attention.c_attn.weight[:HALF].split(2 * HALF, dim=1)
    for number, head in enumerate(heads):
        columns = slice(number * HALF, (number + 1) * HALF)
        queries[:, columns] = HALF**0.5 * (head.looks + REST.looks)
        keys[:, columns] = values[:, columns] = torch.eye(HALF).double()
        attention.c_proj.weight[columns] = with_opposite(head.carries + REST.carries)


def write_mlp(mlp: Any, slope: float, threshold: float) -> None:
    """A neuron that rises from the threshold on, and one that takes away all above 1."""
    for sign, start in ((1, threshold), (-1, threshold + 1)):
        neurons = ANSWERS + (COUNT if sign < 0 else 0)
        mlp.c_fc.weight[READ[ANSWERS], neurons] = slope
        mlp.c_fc.bias[neurons] = -start
        mlp.c_proj.weight[neurons] = sign * with_opposite(torch.eye(HALF).double()[SAID[ANSWERS]])


def documents(*texts: str) -> Pieces:
    named = [(f"document {k}", f" {text}") for k, text in enumerate(texts, start=1)]
    return [(None, "."), *named, (None, " ?")]


def log_odds(logit: float, other: float) -> float:
    """The log-odds of an answer where one other word also has a logit, and the rest have 0."""
    return logit - log(exp(other) + COUNT - 2)


THREE = documents("a x", "b y", "c z")
KNOWN = [
    Known(
        "induction",
        [*THREE[:-1], (None, " b")],
        [Layer(Head(BEFORE, GATHERS)), Layer(Head(link(WORD, READ, SURE), TELLS))],
    ),
    Known("reads document 2", THREE, [Layer(Head(asks(word("y")), TELLS))]),
    Known(
        "ignores the examples",  # they say that b is x, and one head reads that in vain
        [*documents("a z", "b x", "c y")[:-1], ("query", " b"), (None, " ?")],
        [
            Layer(
                Head(asks(PLACE[7]), link(word("abc"), SAID[ANSWERS])),
                Head(asks(PLACE[4]), GATHERS),
            )
        ],
        rests_on=["query"],
    ),
    Known(
        "two redundant paths",
        documents("a y", "b x", "c y"),
        [Layer(Head(asks(PLACE[2]), GATHERS)), Layer(Head(asks(PLACE[6]), GATHERS), slope=1.0)],
        rests_on=["document 1", "document 3"],
    ),
    Known(
        "looks, carries nothing",
        THREE,
        [Layer(Head(asks(word("y")), TELLS), Head(asks(word("x")), NO_VALUES))],
    ),
    Known(
        "carries by its MLP",  # which is at its limit
        THREE,
        [Layer(Head(asks(word("y")), GATHERS), slope=4.0, threshold=1.0)],
    ),
    Known(
        "averages of all",
        documents("y", "y", "x", "y"),
        [Layer(Head(asks(word("xy")), TELLS))],
        rests_on=["document 1", "document 2", "document 4"],
        against=["document 3"],
        lost=log_odds(GAIN * 3 / 4, GAIN / 4) - log_odds(0.0, GAIN),
    ),
    Known(
        "label by its position",  # labels read their texts in vain
        [
            *((None, "."), ("text 1", " a"), ("label 1", " x"), ("text 2", " b")),
            *(("label 2", " z"), ("text 3", " c"), ("label 3", " y"), (None, " ?")),
        ],
        [Layer(Head(BEFORE_SECOND, GATHERS)), Layer(Head(asks(PLACE[6]), TELLS))],
        rests_on=["label 3"],
    ),
    Known(
        "copy through two layers",  # the token after each document reads it, one is read
        [
            *((None, "."), ("document 1", " x"), (None, " ;"), ("document 2", " y")),
            *((None, " ;"), ("document 3", " z"), (None, " ; ?")),
        ],
        [Layer(Head(BEFORE_SECOND, GATHERS)), Layer(Head(asks(PLACE[4]), link(READ, SAID)))],
    ),
    Known(
        "distractor of large norm",  # its length takes four fifths of the attention
        documents("a L", "b y", "c z"),
        [
            Layer(
                Head(
                    asks(word("y")) + link(ASKED, word("LM"), (SURE + log(4)) / LONG),
                    TELLS + link(word("LM"), READ[word("LM")]),
                )
            )
        ],
        lost=GAIN / 5,
    ),
]


def tokenizer() -> Any:
    """One token for each word, and no BOS."""
    core = Tokenizer(models.WordLevel({each: k for k, each in enumerate(WORDS)}, unk_token="."))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token=".")


METHODS = {
    "lasso": lambda count: al.subsets.lasso(2**count),
    "Shapley": lambda count: al.subsets.shapley(),
    "one by one": lambda count: al.subsets.one_by_one,
}
WEIGHTS: dict[str, Any] = {
    "attention": al.weights.attention,
    "value norm": al.weights.value_norm,
    "saliency": al.weights.saliency,
    "signed": al.weights.helpful,
}
COLUMNS = ("attention", "rollout", "value norm", "saliency", "signed", "integrated", *METHODS)
COLUMNS += ("ScoreParts",)


def scores_of(model: Any, prompt: Pieces, cut: Cut | None = None) -> dict[str, Tensor]:
    """Scores of the segments of a prompt, for what the model answers, also where edges are cut."""
    [batch] = al.build_segments(model.tokenizer, [prompt])
    answer = al.target_logits(model, [batch], hooks=cut, progress=False).argmax(-1)

    def loss(logits: Tensor, batch: al.PromptBatch) -> Tensor:
        return cross_entropy(logits, answer.to(logits.device), reduction="none")

    def rest(batch: al.PromptBatch) -> Tensor:
        return batch.attention_mask & (batch.segments < 0)

    parts: Any = {name: partial(al.edges.segment, name=name) for name in batch.segment_names}
    parts |= {"rest": rest}
    asked: list[Any] = [al.SegmentFlows(parts, weight=of, name=key) for key, of in WEIGHTS.items()]
    asked.append(al.SegmentRollout(parts, name="rollout"))
    if cut is None:  # experiments refuse hooks that change the run
        asked.append(al.IntegratedFlows(parts, name="integrated"))
        asked.append(al.ScoreParts(-1, keys=of_segments, name="ScoreParts"))
    results: Any = al.run(model, [batch], asked, hooks=cut, loss=loss, resamples=0, progress=False)
    count = len(batch.segment_names)
    scores = {}
    for name, record in results.items():
        if name == "rollout":
            scores[name] = record.reach[:count]
        elif name == "ScoreParts":  # of the token that the heads prefer, above the lowest token
            of_keys, owners = record.score.mean(0), batch.segments[of_segments(batch)]
            highest = [of_keys[owners == k].max() for k in range(count)]
            scores[name] = torch.stack(highest) - of_keys.min()
        else:  # what others read from a segment
            between = record.total.sum(0)
            scores[name] = (between.sum(0) - between.diagonal())[:count]
    return scores | scores_by_removal(model, prompt, int(answer), cut)


def of_segments(batch: al.PromptBatch) -> Tensor:
    return batch.segments >= 0


def scores_by_removal(
    model: Any, prompt: Pieces, answer: int, cut: Cut | None
) -> dict[str, Tensor]:
    """Scores from the log-odds of the answer with each subset of the segments, in one pass."""
    count = len({name for name, _ in prompt if name})
    numbers = 2 ** torch.arange(count)
    every = (torch.arange(2**count)[:, None] // numbers % 2).bool()

    def hooks(batch: al.PromptBatch) -> Sequence[Any]:
        removed = torch.stack([batch.segments == k for k in range(count)], dim=1)
        removed &= ~every[batch.index, :, None]
        _, removal = al.removal.edges(model, batch, removed.any(1))
        return [*(cut(batch) if cut else ()), *removal]

    batches = al.build_segments(model.tokenizer, [prompt] * len(every), batch_size=len(every))
    logits = al.target_logits(model, batches, hooks=hooks, progress=False).double()
    others = logits.index_fill(1, torch.tensor(answer), -torch.inf).logsumexp(1)
    y = logits[:, answer] - others
    scores = {}
    for name, method_of in METHODS.items():
        method = method_of(count)
        kept = method.draw(count, torch.Generator().manual_seed(0))
        scores[name] = method.scores(kept, y[(kept * numbers).sum(1)])
    return scores


class Grade(NamedTuple):
    """Whether nothing is as high as what the answer rests on, and the share that is right."""

    is_first: bool
    share: float


def grade(scores: Tensor, truth: Tensor) -> Grade:
    """Smaller scores, and differences, than 1e-6 are rounding."""
    scores = scores.double().where(scores.abs() > 1e-6, 0.0)
    is_first = bool(scores[truth > 0].min() > scores[truth <= 0].max() + 1e-6)
    return Grade(is_first, float((truth * scores).sum() / scores.abs().sum().clamp(min=1e-6)))


def grades_of(known: Known) -> dict[str, Grade]:
    """The grade of each score on a tiny model."""
    model = al.load_model(known.weights(), tokenizer=tokenizer())
    scores = scores_of(model, known.prompt)
    return {name: grade(scores[name], known.truth) for name in COLUMNS}


# The real case: facts, of which one is asked for, and nothing but this one can reach the answer.
COLOURS = ("door red", "car blue", "house green", "hat black", "bag white", "boat brown")
SHOWN = 4  # in each prompt
DEMO = ".venv/weights/gemma-3-270m-q4_k_m.gguf"  # of `make demo`


def real_prompt(first: int, asked: int) -> Pieces:
    """Facts from one on in a circle, and a question for one of them by its place."""
    pairs = [COLOURS[(first + k) % len(COLOURS)].split() for k in range(SHOWN)]
    texts = [f"The colour of the {name} is {colour}.\n" for name, colour in pairs]
    told = [(f"document {k}", text) for k, text in enumerate(texts, start=1)]
    return [(None, "Facts:\n"), *told, (None, f"So the colour of the {pairs[asked][0]} is")]


def paths_but(asked: int, model: Any, batch: al.PromptBatch) -> Sequence[Any]:
    """Hooks that cut each edge to another document, but those from other documents."""
    others = of_segments(batch) & (batch.segments != asked)
    return al.block_edges(model, batch, al.edges.between(batch.attention_mask & ~others, others))


def grades_of_real(model: Any) -> dict[str, Grade]:
    """Means over prompts; a score is first if it is in all of them."""
    found: dict[str, list[Grade]] = {}
    for first, asked in product(range(len(COLOURS)), range(SHOWN)):
        truth = (torch.arange(SHOWN) == asked).long()
        cut = partial(paths_but, asked, model)
        for name, scores in scores_of(model, real_prompt(first, asked), cut).items():
            found.setdefault(name, []).append(grade(scores, truth))
    means = {}
    for name, grades in found.items():
        firsts = sum(each.is_first for each in grades)
        print(f"{name}: first in {firsts} of {len(grades)} prompts")
        share = sum(each.share for each in grades) / len(grades)
        means[name] = Grade(firsts == len(grades), share)
    return means


def line(name: str, grades: Mapping[str, Grade]) -> str:
    """A row of the table; a dash where a score cannot be asked."""
    return " | ".join((f"| {name}", *(text_of(grades.get(each)) for each in COLUMNS))) + " |"


def text_of(grade: Grade | None) -> str:
    if grade is None:
        return "-"
    return f"{grade.share:.2f}" + ("" if grade.is_first else "✗")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a real one: hub name, local folder or .gguf file")
    source = parser.parse_args().model or (DEMO if Path(DEMO).exists() else None)
    torch.set_num_threads(1)
    print(f"| model | {' | '.join(COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for known in KNOWN:
        print(line(known.name, grades_of(known)), flush=True)
    if source is None:
        print(f"There is no row of a real model: name one with --model, or make {DEMO}.")
        return
    real = al.load_model(source, dtype=torch.float32)
    print(line(f"{Path(source).stem}, one path", grades_of_real(real)))


if __name__ == "__main__":
    main()
