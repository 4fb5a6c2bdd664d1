"""Toy models of TransformerLens, computed a second time in plain PyTorch from their settings.

``PlainToy`` is the reference. It has the attributes of a transformers model that the oracle of
plain.py needs, and shares no code with TransformerLens. Its parameters have the same names as those
of ``boot_native``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from tests.references.architecture_row import LINE, Row
from tests.support.hooked_transformers import with_its_bos
from tests.support.tiny_models import randomize

COMMON: dict[str, Any] = {
    "n_layers": 3,
    "d_model": 32,
    "n_heads": 4,
    "d_head": 8,
    "d_mlp": 48,
    "n_ctx": 128,
    "act_fn": "gelu",
    "normalization_type": "LN",
    "positional_embedding_type": "standard",
    "init_weights": False,
}
# What the options of a toy leave to TransformerLens.
DEFAULTS: dict[str, Any] = {
    **{"n_key_value_heads": COMMON["n_heads"], "attn_scale": COMMON["d_head"] ** 0.5},
    **{"attn_only": False, "gated_mlp": False, "final_rms": False},
    **{"attn_scores_soft_cap": 0.0, "output_logits_soft_cap": 0.0},
}


def norm(kind: str | None, width: int) -> nn.Module:
    if kind is None:
        return nn.Identity()
    if kind == "RMS":
        return nn.RMSNorm(width, eps=1e-5)
    return nn.LayerNorm(width, elementwise_affine=kind == "LN")


class ToyAttention(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.cfg = cfg
        wide, narrow = cfg.n_heads * cfg.d_head, cfg.n_key_value_heads * cfg.d_head
        self.q, self.o = nn.Linear(cfg.d_model, wide), nn.Linear(wide, cfg.d_model)
        self.k, self.v = nn.Linear(cfg.d_model, narrow), nn.Linear(cfg.d_model, narrow)

    def forward(self, x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the pattern; ``attention_mask`` is True where no token attends."""
        query, key, value = (self.by_head(project(x)) for project in (self.q, self.k, self.v))
        if self.cfg.positional_embedding_type == "rotary":
            query, key = self.rotated(query), self.rotated(key)
        shared = self.cfg.n_heads // self.cfg.n_key_value_heads
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        scores = capped(query @ key.mT / self.cfg.attn_scale, self.cfg.attn_scores_soft_cap)
        pattern = torch.softmax(scores.masked_fill(attention_mask, -torch.inf), -1)
        return self.o((pattern @ value).transpose(1, 2).flatten(2)), pattern

    def by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.cfg.d_head)).transpose(1, 2)

    def rotated(self, x: Tensor) -> Tensor:
        """Pairs of channels are complex numbers, which are multiplied by a number of length 1."""
        width = self.cfg.d_head
        frequencies = 10000 ** -(torch.arange(0, width, 2, dtype=x.dtype) / width)
        angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequencies
        rotations = torch.polar(torch.ones_like(angles), angles)
        pairs = x.unflatten(-1, (-1, 2)).contiguous()
        return torch.view_as_real(torch.view_as_complex(pairs) * rotations).flatten(-2)


class ToyMLP(nn.ModuleDict):
    def __init__(self, cfg: Any) -> None:
        narrow, wide = (cfg.d_model, cfg.d_mlp), (cfg.d_mlp, cfg.d_model)
        sizes = {"gate": narrow, "in": narrow, "out": wide}
        if not cfg.gated_mlp:
            sizes = {"fc_in": narrow, "fc_out": wide}
        has_bias = not cfg.gated_mlp
        super().__init__({name: nn.Linear(*size, bias=has_bias) for name, size in sizes.items()})
        self.act = getattr(nn.functional, cfg.act_fn)

    def forward(self, x: Tensor) -> Tensor:
        if "gate" in self:
            return self["out"](self.act(self["gate"](x)) * self["in"](x))
        return self["fc_out"](self.act(self["fc_in"](x)))


class ToyBlock(nn.Module):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.ln1, self.attn = norm(cfg.normalization_type, cfg.d_model), ToyAttention(cfg)
        self.attn_only = cfg.attn_only
        if not cfg.attn_only:
            self.ln2, self.mlp = norm(cfg.normalization_type, cfg.d_model), ToyMLP(cfg)

    def forward(self, x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        attended, pattern = self.attn(self.ln1(x), attention_mask=attention_mask)
        x = x + attended
        return (x if self.attn_only else x + self.mlp(self.ln2(x))), pattern


class PlainToy(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.cfg = cfg = SimpleNamespace(**DEFAULTS | dict(options))
        self.config = SimpleNamespace(num_hidden_layers=cfg.n_layers)
        self.tok_embed = nn.Embedding(cfg.d_vocab, cfg.d_model)
        if cfg.positional_embedding_type == "standard":
            self.pos = nn.Embedding(cfg.n_ctx, cfg.d_model)
        self.layers = nn.ModuleList([ToyBlock(cfg) for _ in range(cfg.n_layers)])
        self.ln_out = norm("RMS" if cfg.final_rms else cfg.normalization_type, cfg.d_model)
        self.head = nn.Linear(cfg.d_model, cfg.d_vocab, bias=False)

    def forward(self, tokens: Tensor, **_: Any) -> Any:
        n_tokens = tokens.shape[1]
        x = self.tok_embed(tokens)
        x = x + self.pos.weight[:n_tokens] if hasattr(self, "pos") else x
        later = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)[None, None]
        patterns = []
        for block in self.layers:
            x, pattern = block(x, attention_mask=later)
            patterns.append(pattern)
        logits = capped(self.head(self.ln_out(x)), self.cfg.output_logits_soft_cap)
        return SimpleNamespace(logits=logits, attentions=tuple(patterns))


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


@dataclass(frozen=True, kw_only=True)
class Toy(Row):
    """A toy, whose options are settings that both lines of TransformerLens accept.

    Its ``kinds`` are those of model that this line of TransformerLens makes of it.
    """

    kinds: tuple[str, ...]

    def build(
        self, vocab_size: int, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> PlainToy:
        model = PlainToy({**self.options, **changes, "d_vocab": vocab_size})
        randomize(model, scale=self.scale)
        return model.to(dtype)


def toy(name: str, special: str, scale: float = 0.25, **options: Any) -> Toy:
    hooked = LINE.startswith("3.")
    kinds = ("bridge", "processed") + ("HookedTransformer",) * hooked
    return Toy(name, special, COMMON | options, scale, kinds=kinds)


def native_bridge(toy: PlainToy, tokenizer: Any) -> Any:
    """Return the bridge of ``TransformerBridge.boot_native`` with the toy's weights."""
    config: Any = TransformerBridgeConfig(**toy.options, architecture="TransformerLensNative")
    weights = toy.state_dict()
    dtype = toy.head.weight.dtype
    make: Any = TransformerBridge
    bridge = make.boot_native(config, tokenizer=with_its_bos(tokenizer), dtype=dtype)
    theirs = {
        name.replace("._original_component", ""): parameter
        for name, parameter in bridge.original_model.named_parameters()
    }
    missing = {name: torch.zeros_like(theirs[name]) for name in theirs.keys() - weights.keys()}
    assert weights.keys() <= theirs.keys() and missing.keys() <= {"head.bias"}  # on 3.9
    with torch.no_grad():
        for name, weight in (weights | missing).items():
            theirs[name].copy_(weight)
    return bridge


# The names of a toy's layers in a HookedTransformer.
LAYERS = {"tok_embed": "embed.W_E", "pos": "pos_embed.W_pos", "head": "unembed.W_U"}
LAYERS |= {"fc_in": "W_in", "fc_out": "W_out", "gate": "W_gate", "in": "W_in", "out": "W_out"}
LAYERS |= {"ln1": "ln1.w", "ln2": "ln2.w", "ln_out": "ln_final.w"}
LAYERS |= {name: f"W_{name.upper()}" for name in "qkvo"}


def hooked_toy(toy: PlainToy, tokenizer: Any) -> Any:
    """Return the ``HookedTransformer(cfg)`` of TransformerLens 3.9 with the toy's weights."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(**toy.options, dtype=toy.head.weight.dtype, device="cpu")
    model = HookedTransformer(config, tokenizer=with_its_bos(tokenizer))
    state = model.state_dict()
    # Biases that the toy lacks are zero; masks do not change.
    computed = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
    ours = {name: torch.zeros_like(of) for name, of in state.items() if not name.endswith(computed)}
    for name, weight in toy.state_dict().items():
        *path, layer, kind = name.replace("layers", "blocks").split(".")
        last = LAYERS[layer]
        last = last if kind == "weight" else last.replace("W_", "b_").replace(".w", ".b")
        theirs = ".".join([*path, last])
        if theirs not in state:  # of grouped keys and values
            theirs = re.sub(r"(\w_[KV])$", r"_\1", theirs)
        if layer in "qkv" and kind == "weight":
            weight = weight.unflatten(0, (-1, toy.cfg.d_head)).mT
        elif weight.ndim == 2 and layer not in ("tok_embed", "pos"):
            weight = weight.T
        ours[theirs] = weight.reshape(state[theirs].shape)
    model.load_state_dict(state | ours)
    return model


TOYS = [
    toy("Toy", "layer norms, learned positions"),
    toy(
        "Toy (one layer)",
        "attention only, no norm",
        scale=0.45,
        n_layers=1,
        attn_only=True,
        normalization_type=None,
    ),
    toy(
        "Toy (grouped keys)",
        "rotary, grouped keys, root mean square norms, gated MLP",
        positional_embedding_type="rotary",
        rotary_adjacent_pairs=True,
        n_key_value_heads=2,
        normalization_type="RMS",
        gated_mlp=True,
        act_fn="silu",
        final_rms=True,
    ),
    toy(
        "Toy (soft caps)",
        "norms without parameters, capped scores and logits, a scale",
        normalization_type="LNPre",
        attn_scores_soft_cap=3.0,
        output_logits_soft_cap=5.0,
        attn_scale=2.0,
    ),
]
