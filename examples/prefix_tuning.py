"""What can a prefix teach a transformer? Tables 1 to 3 of Petrov, Torr and Bibi (ICLR 2024).

python examples/prefix_tuning.py              # Table 1 with a fourth of the published steps
python examples/prefix_tuning.py --table 2 --seeds 0 1 2
python examples/prefix_tuning.py --table 3 --scale 1 --device cuda

A transformer of one layer learns to sort ten digits up. Table 1: fine-tuning teaches it to sort
down, and a prefix of one token does not. Table 2: of four tasks that a transformer has learned, a
prefix selects one. Table 3: with four layers, ten tokens also join two of them, but do not teach a
new one, which LoRA learns with as many parameters. The reason: a prefix takes the share m_i of a
row of attention, leaves the rest in the same proportions (I1), and moves the output of the head
towards its own value b_i (I2):

    (I1) A+_ij / (1 - m_i) = A_ij        (I2) z+_i = (1 - m_i) z_i + m_i b_i

By default Tables 2 and 3 take a tenth and a fiftieth of the published steps, which two cores finish
in minutes, but with which no prefix selects a task yet; with --scale 1 Table 2 shows it.

Several seeds run beside each other, a core each. Each row is printed when it is known; the table of
their means follows.
"""

import argparse
import copy
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from peft import LoraConfig, get_peft_model
from plotly.subplots import make_subplots
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from anchorlens.replication.beside_published import published

Tokens: TypeAlias = Int[Tensor, "prompt position"]
Prefix: TypeAlias = Float[Tensor, "row layer 2 head position d_head"]  # keys, then values

LENGTH, DIGITS, BATCH = 10, 8, 64
AT_ONCE = 100  # batches that are drawn and moved to the device together
# What a prefix can select, then what it cannot: a task that joins two, and one that is new.
TASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "sort up": lambda digits: digits.sort(-1).values,
    "sort down": lambda digits: digits.sort(-1, descending=True).values,
    "+1": lambda digits: digits + 1,
    "+2": lambda digits: digits + 2,
    "sort up, then +1": lambda digits: digits.sort(-1).values + 1,
    "double histogram": lambda digits: (digits[..., None] == digits[..., None, :]).sum(-1),
}
LEARNED = [*TASKS][:4]


class Run(NamedTuple):
    """A model, and the prefix before its prompts."""

    model: GPT2LMHeadModel
    prefix: Prefix


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
    """Random digits of one split; if more than five of them differ, only half are taken.

    Ten equal digits are left out: no token says how often each of them stands there.
    """
    drawn = torch.empty(0, LENGTH, dtype=torch.long)
    while len(drawn) < count:
        digits = torch.randint(DIGITS, (3 * count, LENGTH), generator=generator)
        kinds = 1 + (digits.sort(1).values.diff() > 0).sum(1)
        taken = (kinds <= 5) | (torch.rand(len(digits), generator=generator) < 0.5)
        taken &= kinds > 1
        drawn = torch.cat([drawn, digits[taken & (is_test(digits) == test)]])
    return drawn[:count]


def draw_batches(
    tasks: Sequence[str], steps: int, generator: torch.Generator, device: str = "cpu"
) -> Iterator[Tokens]:
    """Prompts, each followed by its answer in one of the tasks, which take turns."""
    for first in range(0, steps, AT_ONCE):
        digits = draw_digits(BATCH * min(AT_ONCE, steps - first), generator).to(device)
        answers = torch.stack([TASKS[task](digits) for task in tasks])
        prompts = torch.arange(len(digits), device=device)
        yield from torch.cat([digits, answers[prompts % len(tasks), prompts]], dim=1).split(BATCH)


def new_model(heads: int, width: int, layers: int = 1) -> GPT2LMHeadModel:
    """A GPT-2 with random weights; its dropout in training is 0.1."""
    config = GPT2Config(
        vocab_size=DIGITS + 2,
        n_positions=2 * LENGTH,
        n_layer=layers,
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
    shape = (1, config.n_layer, 2, config.n_head, length, d_head)
    return torch.randn(shape, generator=generator).to(model.device)


def run_after(prefix: Prefix, model: GPT2LMHeadModel, tokens: Tokens, **options: Any) -> Any:
    """The model's output after a prefix for all prompts, or after one for each part of them.

    Tokens after a prefix have the positions that they have without it.
    """
    cache, rows = DynamicCache(), prefix.repeat_interleave(len(tokens) // len(prefix), 0)
    for layer, keys_and_values in enumerate(rows.unbind(1)):
        cache.update(*keys_and_values.unbind(1), layer)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return model(tokens, past_key_values=cache, position_ids=positions, **options)


def clip_rows(weights: Sequence[Tensor], most: float) -> None:
    """Shorten the gradient of each prefix by itself, as if it were trained alone."""
    for weight in weights:
        assert weight.grad is not None
        sizes = torch.linalg.vector_norm(weight.grad, dim=[*range(1, weight.ndim)], keepdim=True)
        weight.grad *= most / sizes.clamp(min=most)


def train(
    optimizer: torch.optim.Optimizer,
    model: Any,
    prefix: Prefix,
    batches: Iterable[Tokens],
    clip: Callable[[Sequence[Tensor], float], object] = torch.nn.utils.clip_grad_norm_,
) -> None:
    """Lower the cross entropy of the answers by the weights that the optimizer has, in place."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for tokens in batches:
        logits = run_after(prefix, model, tokens[:, :-1], logits_to_keep=LENGTH).logits
        # A mean for each prefix, summed.
        total = cross_entropy(logits.flatten(0, 1), tokens[:, LENGTH:].flatten(), reduction="sum")
        loss = total * len(prefix) / tokens[:, LENGTH:].numel()
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        clip(weights, 1.0)
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
    """A copy of a prefix with all its keys and values trained; the model does not change.

    A prefix with several rows is several prefixes, each for an equal part of a batch.
    """
    prefix = prefix.clone().requires_grad_()
    optimizer = torch.optim.AdamW([prefix], lr=lr, betas=(0.9, 0.95))
    train(optimizer, model, prefix, batches, clip_rows)
    return prefix.detach()


def trained_lora(
    model: GPT2LMHeadModel, batches: Iterable[Tokens], lr: float = 5e-3
) -> GPT2LMHeadModel:
    """A copy with a matrix of rank 1 added to each that an attention or MLP ends or begins with."""
    of_rank_1 = LoraConfig(
        r=1, lora_alpha=1, target_modules=["c_fc", "c_proj"], fan_in_fan_out=True
    )
    wrapped: Any = get_peft_model(copy.deepcopy(model), of_rank_1)
    weights = [weight for weight in wrapped.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.95))
    train(optimizer, wrapped.train(), draw_prefix(model, 0, torch.Generator()), batches)
    return wrapped.merge_and_unload().eval()


class Draws(NamedTuple):
    """What the runs of a seed are drawn from, on which device, and the share of all steps."""

    generator: torch.Generator
    device: str
    scale: float

    def batches(self, tasks: Sequence[str], steps: float) -> Iterator[Tokens]:
        return draw_batches(tasks, round(steps * self.scale), self.generator, self.device)

    def prefixes(
        self, model: GPT2LMHeadModel, start: Prefix, tasks: Sequence[str], steps: float
    ) -> Iterator[tuple[str, Run]]:
        """A prefix for each task, all from one start and in one pass."""
        of_tasks = zip(*[self.batches([task], steps) for task in tasks], strict=True)
        starts = start.repeat(len(tasks), *[1] * 5)
        trained = trained_prefix(model, starts, map(torch.cat, of_tasks), lr=5e-5)
        for task, prefix in zip(tasks, trained.split(1), strict=True):
            yield f"prefix for {task}", Run(model, prefix)


def table_1(draws: Draws) -> Iterator[tuple[str, Run]]:
    """Sorting up is pretrained; what teaches the model to sort down?"""
    model = new_model(heads=1, width=96).to(draws.device)
    model = trained_model(model, draws.batches(["sort up"], 20_000))
    none, start = (draw_prefix(model, length, draws.generator) for length in (0, 1))
    yield "pretrained on sort up", Run(model, none)
    tuned = trained_model(model, draws.batches(["sort down"], 10_000))
    yield "fine-tuned on sort down", Run(tuned, none)
    yield "random prefix", Run(model, start)
    prefix = trained_prefix(model, start, draws.batches(["sort down"], 40_000))
    yield "prefix for sort down", Run(model, prefix)


def table_2(draws: Draws) -> Iterator[tuple[str, Run]]:
    """Four tasks are pretrained, and nothing in a prompt says which; can a prefix say it?"""
    model = new_model(heads=4, width=256).to(draws.device)
    model = trained_model(model, draws.batches(LEARNED, 20_000))
    none, start = (draw_prefix(model, length, draws.generator) for length in (0, 1))
    yield "pretrained on all", Run(model, none)
    yield "random prefix", Run(model, start)
    yield from draws.prefixes(model, start, LEARNED, 30_000)


def table_3(draws: Draws) -> Iterator[tuple[str, Run]]:
    """The same with four layers; can a prefix, or LoRA, teach tasks that were not pretrained?

    The longest trainings grow with the square of the scale, so that a small one takes minutes.
    """
    model = new_model(heads=4, width=256, layers=4).to(draws.device)
    model = trained_model(model, draws.batches(LEARNED, 40_000))
    none, start, as_lora = (draw_prefix(model, length, draws.generator) for length in (0, 10, 6))
    yield "pretrained on all", Run(model, none)
    yield from draws.prefixes(model, start, LEARNED, 20_000)
    histogram = ["double histogram"]
    yield "LoRA of rank 1", Run(trained_lora(model, draws.batches(histogram, 10_000)), none)
    for _, run in draws.prefixes(model, as_lora, histogram, 100_000 * draws.scale):
        yield "as many parameters", run
    yield from draws.prefixes(model, start, [*TASKS][4:], 500_000 * draws.scale)


TABLES = {1: (table_1, LEARNED[:2]), 2: (table_2, LEARNED), 3: (table_3, [*TASKS])}
SCALES = {1: 0.25, 2: 0.1, 3: 0.02}
HELP = "part of the published steps (1/4, 1/10, 1/50); of the longest of Table 3 its square"


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
    after, length = attention(run, tokens), run.prefix.shape[4]
    onto_prefix, onto_tokens = after.pattern[..., :length], after.pattern[..., length:]
    rest = onto_tokens.sum(-1, keepdim=True)  # 1 - m, with all digits where m is almost 1
    relative = onto_tokens / rest
    output = rest * before.output + onto_prefix @ run.prefix[0, 0, 1].double()
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


class Row(NamedTuple):
    """What a seed gives for a run: per cent right by task, mean m, largest errors of I1 and I2."""

    accuracies: Sequence[float]
    stolen: float
    residual_1: float
    residual_2: float


def rows_of_seed(seed: int, options: argparse.Namespace) -> dict[str, Row]:
    """The rows of a table; each is printed when it is known."""
    torch.set_num_threads(1)  # on a model this small, two threads take twice as long
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # weights and dropout
    table, tasks = TABLES[options.table]
    digits = draw_digits(options.tests, generator, test=True).to(options.device)
    tokens = torch.cat([digits, TASKS["sort down"](digits)], dim=1)[:100, :-1]
    rows, effects = dict[str, Row](), dict[str, Effect]()
    begin, before = time.monotonic(), None
    for name, run in table(Draws(generator, options.device, options.scale)):
        before = before or attention(run, tokens)
        answered, change = answers(run, digits), effect(run, before, tokens)
        right = [
            100 * (answered == TASKS[task](digits)).all(1).double().mean().item() for task in tasks
        ]
        rows[name] = Row(right, change.stolen, change.residual_1, change.residual_2)
        effects[name] = change
        cells = " ".join(f"{value:.1f}" for value in right)
        print(f"seed {seed}, {time.monotonic() - begin:.0f} s: {name}: {cells}", flush=True)
    if seed == options.seeds[0]:
        draw_patterns(effects, tokens).write_html("prefix_tuning.html")
    return rows


def published_lines(table: int, row: str, tasks: Sequence[str]) -> Iterator[str]:
    """The published values of a row, a line for each of their settings."""
    name = "lora" if row in ("LoRA of rank 1", "as many parameters") else f"table_{table}"
    for setting, values in published("prefix_tuning", name).items():
        known = dict(values.get("prefix" if row == "as many parameters" else row, {}))
        if (task := row.removeprefix("prefix for ")) != row and not known:
            own = values.get("prefix for this task", {})
            known = {task: own[task]} if task in own else {}
        cells = [
            f"{known[task].value:g}" + f" ± {known[task].spread:g}".replace(" ± nan", "")
            if task in known
            else ""
            for task in tasks
        ]
        if any(cells):
            yield f"  published, {setting}".ljust(28) + "".join(f"{cell:>18}" for cell in cells)


def print_table(table: int, of_seeds: Sequence[Mapping[str, Row]]) -> None:
    """Means over seeds, with their standard deviation, above the published values."""
    tasks = TABLES[table][1]
    print(f"{'':28}" + "".join(f"{task:>18}" for task in tasks) + "   mean m       I1       I2")
    for name in of_seeds[0]:
        rows = [rows[name] for rows in of_seeds]
        of_tasks = torch.tensor([row.accuracies for row in rows]).T
        cells = [
            f"{each.mean():.1f}" + (f" ± {each.std():.1f}" if len(rows) > 1 else "")
            for each in of_tasks
        ]
        print(
            f"{name:28}{''.join(f'{cell:>18}' for cell in cells)}"
            f"   {sum(row.stolen for row in rows) / len(rows):6.2f}"
            f"  {max(row.residual_1 for row in rows):7.0e}"
            f"  {max(row.residual_2 for row in rows):7.0e}"
        )
        print("".join(f"{line}\n" for line in published_lines(table, name, tasks)), end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--scale", type=float, help=HELP)
    parser.add_argument("--tests", type=int, default=3200, help="prompts to test")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.scale = SCALES[options.table] if options.scale is None else options.scale

    print(f"{options.scale:g} of the published steps of training, {options.tests} test prompts")
    start, work = time.monotonic(), partial(rows_of_seed, options=options)
    if len(options.seeds) == 1:
        of_seeds = [*map(work, options.seeds)]
    else:
        spawn = multiprocessing.get_context("spawn")
        workers = min(len(options.seeds), os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            of_seeds = [*pool.map(work, options.seeds)]
    print("per cent of prompts with all ten tokens right, mean ± standard deviation over seeds")
    print_table(options.table, of_seeds)
    print(f"{time.monotonic() - start:.0f} seconds")


if __name__ == "__main__":
    main()
