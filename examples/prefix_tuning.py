"""What can a prefix teach a transformer? Tables 1 and 2 of Petrov, Torr and Bibi (ICLR 2024).

python examples/prefix_tuning.py              # Table 1 with a fourth of the published steps
python examples/prefix_tuning.py --scale 1    # Table 1 in full
python examples/prefix_tuning.py --table 2 --scale 1

A transformer of one layer learns to sort ten digits up. Table 1: fine-tuning teaches it to sort
down, and a prefix of one token does not. Table 2: of four tasks that a transformer has learned, a
prefix selects one. The reason: a prefix takes the share m_i of a row of attention, leaves the rest
in the same proportions (I1), and moves the output of the head towards its own value b_i (I2):

    (I1) A+_ij / (1 - m_i) = A_ij        (I2) z+_i = (1 - m_i) z_i + m_i b_i
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from plotly.subplots import make_subplots
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

Tokens: TypeAlias = Int[Tensor, "prompt position"]
Prefix: TypeAlias = Float[Tensor, "layer 2 head position d_head"]  # keys, then values

LENGTH, DIGITS, BATCH = 10, 8, 64
TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort up": lambda digits: digits.sort(-1).values,
    "sort down": lambda digits: digits.sort(-1, descending=True).values,
    "+1": lambda digits: digits + 1,
    "+2": lambda digits: digits + 2,
}


class Run(NamedTuple):
    """A model, the prefix before its prompts, and its published accuracy in each task."""

    model: GPT2LMHeadModel
    prefix: Prefix
    published: Sequence[float] = ()


class Attention(NamedTuple):
    """What the heads of the first layer do, in float64."""

    pattern: Float[Tensor, "prompt head query key"]
    output: Float[Tensor, "prompt head query d_head"]


class Effect(NamedTuple):
    """What a run changes in the attention of the pretrained model, on the same tokens."""

    pattern: Float[Tensor, "prompt head query key"]
    relative: Float[Tensor, "prompt head query key"]
    stolen: float
    residual_1: float
    residual_2: float


def is_test(digits: Tokens) -> Bool[Tensor, " prompt"]:
    """Whether prompts are for tests: a fourth of all, and the same ones in every process."""
    number = (digits * DIGITS ** torch.arange(LENGTH)).sum(1)
    return (number * 2654435761 >> 16) % 4 == 0  # Knuth's multiplicative hash


def draw_digits(count: int, generator: torch.Generator, *, test: bool = False) -> Tokens:
    """Random digits of one split; if more than five of them differ, only half are taken."""
    drawn = torch.empty(0, LENGTH, dtype=torch.long)
    while len(drawn) < count:
        digits = torch.randint(DIGITS, (3 * count, LENGTH), generator=generator)
        kinds = 1 + (digits.sort(1).values.diff() > 0).sum(1)
        taken = (kinds <= 5) | (torch.rand(len(digits), generator=generator) < 0.5)
        drawn = torch.cat([drawn, digits[taken & (is_test(digits) == test)]])
    return drawn[:count]


def draw_batches(tasks: Sequence[str], steps: int, generator: torch.Generator) -> Iterator[Tokens]:
    """Prompts, each followed by its answer in one of the tasks, which take turns."""
    prompts = torch.arange(BATCH)
    for _ in range(steps):
        digits = draw_digits(BATCH, generator)
        answers = torch.stack([TASKS[task](digits) for task in tasks])
        yield torch.cat([digits, answers[prompts % len(tasks), prompts]], dim=1)


def new_model(heads: int, width: int) -> GPT2LMHeadModel:
    """A GPT-2 of one layer with random weights; its dropout in training is 0.1."""
    config = GPT2Config(
        vocab_size=DIGITS + 2,
        n_positions=2 * LENGTH,
        n_layer=1,
        n_head=heads,
        n_embd=width,
        activation_function="gelu_pytorch_tanh",  # the same function as gelu_new, and faster
        attn_implementation="eager",  # the one that returns its patterns
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def draw_prefix(model: GPT2LMHeadModel, length: int, generator: torch.Generator) -> Prefix:
    """Normal keys and values of some virtual tokens; a prefix of length 0 is no prefix."""
    config = model.config
    d_head = config.n_embd // config.n_head
    return torch.randn(config.n_layer, 2, config.n_head, length, d_head, generator=generator)


def run_after(prefix: Prefix, model: GPT2LMHeadModel, tokens: Tokens, **options: Any) -> Any:
    """The model's output; tokens after a prefix have the positions that they have without it."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(prefix):
        rows = (len(tokens), -1, -1, -1)
        cache.update(keys.expand(rows), values.expand(rows), layer)
    positions = torch.arange(tokens.shape[1])[None]
    return model(tokens, past_key_values=cache, position_ids=positions, **options)


def train(
    optimizer: torch.optim.Optimizer,
    model: GPT2LMHeadModel,
    prefix: Prefix,
    batches: Iterable[Tokens],
) -> None:
    """Lower the cross entropy of the answers by the weights that the optimizer has, in place."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for tokens in batches:
        logits = run_after(prefix, model, tokens[:, :-1], logits_to_keep=LENGTH).logits
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, LENGTH:].flatten())
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()


def trained_model(model: GPT2LMHeadModel, batches: Iterable[Tokens]) -> GPT2LMHeadModel:
    """A copy with all weights trained; matrices decay, embeddings and vectors do not."""
    model = copy.deepcopy(model).train()
    weights = dict(model.named_parameters())
    matrices = {name for name, weight in weights.items() if weight.ndim == 2}
    matrices -= {"transformer.wte.weight", "transformer.wpe.weight"}
    groups = [
        {"params": [weights[name] for name in weights if name in matrices], "weight_decay": 0.1},
        {"params": [weights[name] for name in weights if name not in matrices], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.95))
    train(optimizer, model, draw_prefix(model, 0, torch.Generator()), batches)
    return model.eval()


def trained_prefix(
    model: GPT2LMHeadModel, prefix: Prefix, batches: Iterable[Tokens], lr: float = 5e-4
) -> Prefix:
    """A copy of a prefix with all its keys and values trained; the model does not change."""
    prefix = prefix.clone().requires_grad_()
    train(torch.optim.AdamW([prefix], lr=lr, betas=(0.9, 0.95)), model, prefix, batches)
    return prefix.detach()


def table_1(scale: float, generator: torch.Generator) -> dict[str, Run]:
    """Sorting up is pretrained; what teaches the model to sort down?"""
    model = trained_model(
        new_model(heads=1, width=96), draw_batches(["sort up"], round(20_000 * scale), generator)
    )
    tuned = trained_model(model, draw_batches(["sort down"], round(10_000 * scale), generator))
    none, start = (draw_prefix(model, length, generator) for length in (0, 1))
    prefix = trained_prefix(
        model, start, draw_batches(["sort down"], round(40_000 * scale), generator)
    )
    return {
        "pretrained on sort up": Run(model, none, (0.91, 0.0)),
        "fine-tuned on sort down": Run(tuned, none, (0.0, 0.85)),
        "random prefix": Run(model, start),
        "prefix for sort down": Run(model, prefix, (0.0, 0.0)),
    }


def table_2(scale: float, generator: torch.Generator) -> dict[str, Run]:
    """Four tasks are pretrained, and nothing in a prompt says which; can a prefix say it?

    The published values are those of the published notebook.
    """
    model = trained_model(
        new_model(heads=4, width=256), draw_batches([*TASKS], round(20_000 * scale), generator)
    )
    none, start = (draw_prefix(model, length, generator) for length in (0, 1))
    runs = {
        "pretrained on all": Run(model, none, (0.31, 0.19, 0.30, 0.16)),
        "random prefix": Run(model, start),
    }
    published = {
        "sort up": (0.94, 0.00, 0.00, 0.00),
        "sort down": (0.00, 0.84, 0.00, 0.01),
        "+1": (0.00, 0.00, 1.00, 0.00),
        "+2": (0.00, 0.00, 0.00, 1.00),
    }
    for task, values in published.items():
        batches = draw_batches([task], round(30_000 * scale), generator)
        prefix = trained_prefix(model, start, batches, lr=5e-5)
        runs[f"prefix for {task}"] = Run(model, prefix, values)
    return runs


@torch.no_grad()
def answers(run: Run, digits: Tokens) -> Tokens:
    """Ten tokens for each prompt, each of them the most likely one after those before."""
    tokens = digits
    for _ in range(LENGTH):
        logits = run_after(run.prefix, run.model, tokens, logits_to_keep=1).logits
        tokens = torch.cat([tokens, logits.argmax(-1)], dim=1)
    return tokens[:, LENGTH:]


@torch.no_grad()
def attention(run: Run, tokens: Tokens) -> Attention:
    """Patterns and outputs of the heads in the first layer."""
    model, inputs = copy.deepcopy(run.model).double(), list[Tensor]()
    projection = model.transformer.h[0].attn.c_proj
    projection.register_forward_pre_hook(lambda module, arguments: inputs.extend(arguments))
    patterns = run_after(run.prefix.double(), model, tokens, output_attentions=True).attentions
    heads = inputs[0].unflatten(-1, (model.config.n_head, -1))
    return Attention(patterns[0], heads.transpose(1, 2))


def effect(run: Run, before: Attention, tokens: Tokens) -> Effect:
    """The mean share m that the prefix takes, and the largest errors of (I1) and (I2)."""
    after, length = attention(run, tokens), run.prefix.shape[3]
    onto_prefix, onto_tokens = after.pattern[..., :length], after.pattern[..., length:]
    rest = onto_tokens.sum(-1, keepdim=True)  # 1 - m, with all digits where m is almost 1
    relative = onto_tokens / rest
    output = rest * before.output + onto_prefix @ run.prefix[0, 1].double()
    return Effect(
        pattern=after.pattern,
        relative=relative,
        stolen=float(1 - rest.mean()),
        residual_1=float((relative - before.pattern).abs().max()),
        residual_2=float((after.output - output).abs().max()),
    )


def draw_patterns(effects: Mapping[str, Effect], tokens: Tokens) -> go.Figure:
    """Head 0 on one prompt: above A+, and below A+ / (1 - m), how it divides the rest."""
    titles = [f"{name}<br>{part}" for part in ("A+", "A+ / (1 - m)") for name in effects]
    figure = make_subplots(2, len(effects), subplot_titles=titles, vertical_spacing=0.16)
    names = [f"{position}: {token}" for position, token in enumerate(tokens[0].tolist())]
    for column, change in enumerate(effects.values(), start=1):
        for row, pattern in enumerate((change.pattern[0, 0], change.relative[0, 0]), start=1):
            keys = ["prefix"] * (pattern.shape[1] - len(names)) + names
            heat = go.Heatmap(z=pattern.tolist(), x=keys, y=names, coloraxis="coloraxis")
            figure.add_trace(heat, row, column)
    figure.update_layout(coloraxis={"cmin": 0, "cmax": 1, "colorscale": "Cividis"}, height=1000)
    return figure.update_xaxes(title="key").update_yaxes(title="query", autorange="reversed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", type=int, choices=(1, 2), default=1)
    parser.add_argument("--scale", type=float, default=0.25, help="part of the published steps")
    parser.add_argument("--tests", type=int, default=3200, help="prompts to test")
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()

    torch.set_num_threads(1)  # on a model this small, two threads take twice as long
    start, generator = time.monotonic(), torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)  # weights and dropout
    runs = {1: table_1, 2: table_2}[options.table](options.scale, generator)
    tasks = [*TASKS][: 2 * options.table]

    print(f"{options.scale:g} of the published steps of training, {options.tests} test prompts")
    print("accuracy: all ten tokens right (published, with all steps)")
    print(f"{'':24}" + "".join(f"{task:>13}" for task in tasks) + "   mean m       I1       I2")
    digits = draw_digits(options.tests, generator, test=True)
    tokens = torch.cat([digits, TASKS["sort down"](digits)], dim=1)[:100, :-1]
    before, effects = attention(next(iter(runs.values())), tokens), {}
    for name, run in runs.items():
        answered, effects[name] = answers(run, digits), effect(run, before, tokens)
        right = [(answered == TASKS[task](digits)).all(1).double().mean().item() for task in tasks]
        published = [f" ({value:.2f})" for value in run.published] or [" " * 7] * len(tasks)
        cells = [f"{value:6.2f}{text}" for value, text in zip(right, published, strict=True)]
        change = effects[name]
        print(
            f"{name:24}{''.join(cells)}   {change.stolen:6.2f}"
            f"  {change.residual_1:7.0e}  {change.residual_2:7.0e}"
        )
    print(f"{time.monotonic() - start:.0f} seconds on one thread")
    draw_patterns(effects, tokens).write_html("prefix_tuning.html")


if __name__ == "__main__":
    main()
