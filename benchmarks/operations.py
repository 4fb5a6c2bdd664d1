"""Operations that a run starts on a device, over those of plain transformers.

Counts are whole numbers, so that the load of the machine does not matter. They are linear in layers
and batches: they are counted on a simulated device with 3 and 6 layers and with 1 and 3 batches of
two padded prompts, and extended to the size that is asked for.

    python benchmarks/operations.py --kind gpt2 --layers 48
"""

import argparse
import cProfile
import pstats
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import anchorlens as al
from tests.support import simulated_device
from tests.support.tiny_models import byte_level_tokenizer, randomize

VIEWS = (
    *("view", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze", "detach"),
    *("alias", "_unsafe_view", "as_strided", "permute", "split", "unbind", "split_with_sizes"),
    *(
        "new_empty",
        "empty",
        "_reshape_alias",
        "lift_fresh",
        "detach_",
        "unsafe_split",
        "narrow",
        "diagonal",
        "chunk",
    ),
)
TASK = al.Task("{text}:{label}\n", labels=(" yes", " no"))
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


def gpt2(vocabulary: int, layers: int) -> Any:
    """A GPT-2 of width 16."""
    options = {"n_embd": 16, "n_head": 2, "n_positions": 256, "bos_token_id": 0, "eos_token_id": 0}
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_layer=layers, **options, **off))


def llama(vocabulary: int, layers: int) -> Any:
    """A Llama of width 16."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    options = {**sizes, "num_hidden_layers": layers, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **options))


KINDS = {"gpt2": gpt2, "llama": llama}


class OnDevice(TorchDispatchMode):
    """Counts the operations on the simulated device that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [
            each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)
        ]
        if name not in VIEWS and any(each.device.type == "sim" for each in tensors):
            self.names[name] += 1
        return out


def started(call: Callable[[], Any]) -> torch.Tensor:
    """Operations on the simulated device, and waits, of the second call."""
    call()
    with OnDevice() as mode, simulated_device.waits() as waits:
        call()
    return torch.tensor([mode.names.total(), sum(waits.values())]).double()


def called(call: Callable[[], Any]) -> torch.Tensor:
    """Calls of Python of the second call."""
    call()
    profile = cProfile.Profile()
    profile.runcall(call)
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return torch.tensor([calls]).double()


def prompts(model: Any) -> list[al.PromptBatch]:
    """Batches of two prompts of different lengths, so that each has padding."""
    words = [
        "we",
        "you",
        "they",
        "a",
        "is",
        "the",
        "of",
        "in",
        "what",
        "who",
        "it",
        "to",
        "how",
        "for",
        "on",
        "at",
    ]
    shots = [al.Example("I am", label=0), al.Example("he is", label=1)]
    queries = [
        al.Example(" ".join(words[(i * 7 + 3 + k) % 16] for k in range(2 + i)), label=i % 2)
        for i in range(6)
    ]
    return al.build_prompts(model.tokenizer, TASK, shots, queries, batch_size=2)


def plain(model: Any, batch: al.PromptBatch, *, backward: bool) -> None:
    """A pass of transformers itself, with its eager attention, and the gradient."""
    with torch.set_grad_enabled(backward):
        tokens, mask = (each.to(model.device) for each in (batch.tokens, batch.attention_mask))
        embedded = model.get_input_embeddings()(tokens).detach().requires_grad_(backward)
        mask = mask.long()
        states = model.base_model(inputs_embeds=embedded, attention_mask=mask, use_cache=False)
        rows = torch.arange(len(batch))
        last = states.last_hidden_state[rows, batch.target_positions]
        logits = model.get_output_embeddings()(last)
        loss = al.losses.label_cross_entropy(logits, batch).sum()
    if backward:
        loss.backward()


@dataclass(frozen=True)
class Counts:
    """What is counted with 3 and 6 layers, extended to any number."""

    few: torch.Tensor
    many: torch.Tensor

    def at(self, layers: int) -> torch.Tensor:
        return self.few + (self.many - self.few) * (layers - 3) / 3


def models_of(kind: str, device: str = "sim") -> list[tuple[Any, Any]]:
    """With 3 and with 6 layers, a model of transformers and a hooked one with equal weights."""
    tokenizer, models = byte_level_tokenizer(400), []
    for layers in (3, 6):
        weights = randomize(KINDS[kind](len(tokenizer), layers), scale=0.2)
        alone = KINDS[kind](len(tokenizer), layers)
        alone.load_state_dict(weights.state_dict())
        alone.set_attn_implementation("eager")
        alone.requires_grad_(False).to(device).eval()
        models.append((alone, al.load_model(weights.to(device), tokenizer=tokenizer)))
    return models


def metrics_of_a_run(
    kind: str, *, share: bool = False, device: str = "sim"
) -> tuple[Counts, Counts, Counts]:
    """A batch of plain transformers; one more batch of flows and AUCROC; the rest of a run."""
    metrics = [al.SaliencyFlows(), al.AttentionAUCROC()]
    run = partial(al.run, share_prefix=share, **QUIET)
    count, found = called if device == "cpu" else started, []
    for alone, model in models_of(kind, device):
        batches = prompts(model)
        floor = count(partial(plain, alone, batches[1], backward=True))
        one, three = (count(partial(run, model, batches[:n], metrics)) for n in (1, 3))
        batch = (three - one) / 2
        found.append((floor, batch, one - batch))
    floors, batches_of_runs, rests = zip(*found, strict=True)
    return Counts(*floors), Counts(*batches_of_runs), Counts(*rests)


def isolated_pass(kind: str) -> tuple[Counts, Counts]:
    """A forward pass of plain transformers, and one more pass of an isolation, of one batch."""
    found = []
    for alone, model in models_of(kind):
        batches = prompts(model)[1:2]

        def run(draws: int, model: Any = model, batches: Any = batches) -> Any:
            sweep = al.EdgeSweep.isolation({"all": al.Site()}, draws=draws)
            return al.run(model, batches, [sweep], share_prefix=False, **QUIET)

        floor = started(partial(plain, alone, batches[0], backward=False))
        one, three = (started(partial(run, draws)) for draws in (1, 3))
        found.append((floor, (three - one) / 2))
    floors, further = zip(*found, strict=True)
    return Counts(*floors), Counts(*further)


def share_of_plain(floor: Counts, batch: Counts, rest: Counts, layers: int, batches: int) -> float:
    """The operations of a run, over those of as many batches of plain transformers."""
    ours = batch.at(layers) * batches + rest.at(layers)
    return float(ours[0] / (floor.at(layers) * batches)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="gpt2")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--share", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    counts = metrics_of_a_run(given.kind, share=given.share)
    calls = metrics_of_a_run(given.kind, share=given.share, device="cpu")
    layers = given.layers
    print("                   operations      waits      calls of Python, on a CPU")
    for name, *both in zip(("plain, ", "al.run, ", "al.run, once "), counts, calls, strict=True):
        of_layer = torch.cat([each.at(layers) - each.at(layers - 1) for each in both])
        of_all = torch.cat([each.at(layers) for each in both])
        for what, values in (("a layer", of_layer), ("in all", of_all)):
            print(f"{name + what:20}", " ".join(f"{value:10.0f}" for value in values))
    share = share_of_plain(*counts, given.layers, given.batches)
    print(f"a run of {given.batches} batches starts {share:.2f} times the operations of plain")
    alone, further = isolated_pass(given.kind)
    share = float((further.at(given.layers) / alone.at(given.layers))[0])
    print(f"a further pass of an isolation starts {share:.2f} times those of a forward pass")


if __name__ == "__main__":
    simulated_device.install()
    main()
