"""Turns positions and edges into plain TransformerLens hooks: block, scale, isolate, replace.

Each function takes a ``Site``, the layers and heads to act in, and returns a list of ``(hook name,
function)`` pairs for ``run_with_hooks``; lists join with ``+``. For ``al.run``, make a function of
the batch of it: ``hooks=lambda batch: al.block_edges(model, batch, al.edges.pq)``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .errors import HookError, PromptError
from .models.batch_hooks import DetachedHeads, EdgeHook, TargetHook, WholeHook
from .models.facts import facts_of
from .models.head_outputs import require_separate_heads, separate_heads
from .models.hooked import (
    Hook,
    HookedModel,
    LearnedBeta,
    attention_layers,
    check_fits,
    indices_of,
    layer_numbers,
    layers_without_pattern,
    pattern_name,
    refuse_folded_value_biases,
    scores_name,
    z_name,
)
from .prompts import edges as edge_sets
from .prompts.batch import PromptBatch, check_inside, in_longer_rows
from .prompts.edge_set import Edges, EdgeSet, EdgesOfBatch, check_edges
from .prompts.positions import checked_positions
from .system.arguments import called, checked
from .system.devices import beside, holds_numbers
from .system.texts import described
from .system.warn import warn_user


@checked
@dataclass(frozen=True)
class Site:
    """Where and how hooks act on attention. A function that takes a site also takes bare layers.

    Attributes:
        layers: Layers by number; negative numbers count from the end: ``range(-5, 0)`` are the last
            5. None for all that have an attention (others may be recurrent). A pair, which may mean
            a head, must be a list.
        heads: Heads in each of these layers; None for all. With ``layers`` left out, the heads of
            each layer by its number: ``al.Site(heads={3: [0, 4], 5: 1})``.
        keep_bos: Leave the edges to BOS, which the paper's prompts have not, as they are. Their cut
            alone explains much of the effect, so report both.
        renormalize: True acts before the softmax, so that the rest of each row still sums to 1 (the
            published code). False acts on the pattern after the softmax (the paper's equation).

    Examples:
        >>> cut = al.block_edges(model, batch, al.edges.wp, al.Site(range(3), heads=0))
        >>> the_same = al.block_edges(model, batch, al.edges.wp, al.Site(range(3), heads=[0]))
        >>> in_all_heads = al.block_edges(model, batch, al.edges.wp, range(3))
    """

    layers: Iterable[int] | int | None = None
    heads: Mapping[int, Iterable[int] | int] | Iterable[int] | int | None = None
    keep_bos: bool = False
    renormalize: bool = True

    @classmethod
    @checked
    def of_heads(cls, heads: Iterable[tuple[int, int]]) -> "Site":
        """The site of single heads, given as (layer, head).

        Raises:
            HookError: There is no head.

        Examples:
            >>> al.Site.of_heads([(0, 1), (2, 0), (2, 1)]).heads
            {0: [1], 2: [0, 1]}
        """
        by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            by_layer.setdefault(layer, []).append(head)
        if not by_layer:
            raise HookError("there is no head; give a list of (layer, head)")
        return cls(heads=by_layer)

    @staticmethod
    def _in_place_of(value: Any) -> str:
        """What to write in place of a list of heads."""
        are_pairs = isinstance(value, list | tuple) and all(
            isinstance(each, tuple | list) and len(each) == 2 for each in value
        )
        return f"write al.Site.of_heads({value!r})" if are_pairs and value else ""

    def __post_init__(self) -> None:
        if isinstance(self.heads, Mapping) and self.layers is not None:
            raise HookError(
                "heads by layer name the layers too; leave layers out, or give heads for all of "
                f"them; got {self}"
            )
        if isinstance(self.layers, tuple) and len(self.layers) == 2:
            raise HookError(
                f"a pair of layers is a list, because {self.layers!r} may mean a head; write "
                f"{[*self.layers]!r} for these layers, al.Site(layer, heads=[head]) for a head"
            )

    @checked
    def layers_of(self, model: HookedModel) -> list[int]:
        """The layers of this model, as numbers from 0.

        Raises:
            HookError: A layer does not exist, or has no attention.
        """
        able = attention_layers(model)
        every = self.heads if isinstance(self.heads, Mapping) else able
        layers = layer_numbers(model, every if self.layers is None else self.layers)
        if others := sorted({*layers}.difference(able)):
            raise HookError(
                f"layers {others} of {model.cfg.model_name} have no attention to act on; those "
                f"with attention are {able}: name some of these, or leave layers out for all"
            )
        return layers

    @checked
    def heads_of(self, model: HookedModel, layer: int) -> list[int]:
        """The heads in one of these layers, as numbers from 0.

        Raises:
            HookError: A head does not exist.
        """
        count, heads = model.cfg.n_heads, self.heads
        if not isinstance(heads, Mapping):
            return indices_of("head", range(count) if heads is None else heads, count)
        given = [heads[each] for each in (layer, layer - model.cfg.n_layers) if each in heads]
        return sorted({head for each in given for head in indices_of("head", each, count)})


SiteOrLayers = Site | Iterable[int] | int
EVERYWHERE = Site()


def require_fit(
    model: HookedModel, batch: PromptBatch | None = None, *inside: str, of_values: bool = False
) -> None:
    """Raise an error where hooks, also ``of_values`` of heads, would not do what they say."""
    facts_of(model)  # an error if it is not prepared
    if of_values:
        refuse_folded_value_biases(model)
    if batch is not None:
        check_fits(model, batch)
        for name in inside:
            check_inside(batch, name)


@checked
def block_edges(
    model: HookedModel,
    batch: PromptBatch,
    edges: Edges | EdgesOfBatch,
    site: SiteOrLayers = EVERYWHERE,
) -> list[Hook]:
    """Hooks that cut edges of the attention, also where the keys of the first tokens are cached.

    While the model writes (``model.generate`` inside ``model.hooks``), a written token is a query
    like the target, the last token of its prompt: it does not attend to the keys from which the
    target is cut, and no edge to a written token is cut. For another rule give edges longer than
    the prompts, [prompt, query, key]. This holds for all hooks of edges. Where it cannot be known
    which tokens a pass runs, it is an error.

    Args:
        model: The hooked model to which the hooks will be added.
        edges: Function of the batch to edges, such as ``al.edges.pq``; or edges of the batch, True
            where the query must not attend to the key. Join a table for all prompts with a set:
            ``al.edges.every(batch) & table``.
        site: Layers, or an ``al.Site`` with heads and more; all layers and heads by default.

    Raises:
        PromptError: ``edges`` is not of True and False or not of the shape of the prompts, an edge
            goes to a later token or belongs to padding, or the prompts do not fit the model.
        HookError: A layer or head does not exist, prompts have no BOS to keep, or
            ``renormalize=True`` would cut the edge of a position to itself.
        ModelError: The model was not prepared, or, without ``renormalize``, its value biases are
            folded.

    Warns:
        UserWarning: There is no edge, so that nothing is cut. In ``al.run`` it is an error if no
            prompt of any batch has an edge.

    Examples:
        >>> cut = al.block_edges(model, batch, al.edges.pq, range(3))
        >>> logits = model.run_with_hooks(batch.tokens.to(model.cfg.device), fwd_hooks=cut)

        What the model writes if it cannot read token 3.

        >>> [prompt] = al.build_segments(model.tokenizer, ["The museum opens at ten. When? At"])
        >>> cut = al.block_edges(model, prompt, al.edges.read_by([3]))
        >>> with model.hooks(fwd_hooks=cut):
        ...     tokens = prompt.tokens.to(model.cfg.device)
        ...     written = model.generate(tokens, max_new_tokens=3, verbose=False)
    """
    where = as_site(site)
    require_fit(model, batch)
    chosen = _checked_edges(batch, edges, "cut" if where.renormalize else None)
    return hooks_on_edges(model, batch, chosen, where)


@checked
def scale_edges(
    model: HookedModel,
    batch: PromptBatch,
    edges: Edges | EdgesOfBatch,
    factor: float | Float[Tensor, ""] | Float[Tensor, "layer head"],
    site: SiteOrLayers = EVERYWHERE,
) -> list[Hook]:
    r"""Hooks that multiply the attention along edges by a factor: 0 cuts them, 1 changes nothing.

    With f the factor on the edges and 1 elsewhere,

    $$
    A'_{h\ell}(i, j) = \frac{f_{ij} \, A_{h\ell}(i, j)}{\sum\limits_k f_{ik} \, A_{h\ell}(i, k)}
    \quad (\texttt{renormalize=True}), \qquad
    A'_{h\ell}(i, j) = f_{ij} \, A_{h\ell}(i, j) \quad (\texttt{renormalize=False}).
    $$

    A factor of 0 gives the numbers of ``block_edges`` bit for bit. Gradients flow into a tensor.

    Arguments, errors and warnings that are not here are those of ``block_edges``.

    Args:
        factor: A number from 0 up, or one for each layer and head of the model, of which those of
            the site are used.
        site: With ``renormalize=True``, ``log(factor)`` is added to the scores: an attention sink
            gets a part of what the edges lose.

    Raises:
        HookError: ``factor`` is negative, not finite or of another shape; or, with
            ``renormalize=True``, 0 for edges of a position to itself, or in a tensor that needs a
            gradient (``log`` has none there).

    Examples:
        >>> half = al.scale_edges(model, batch, al.edges.pq, 0.5, range(3))
        >>> logits = model.run_with_hooks(batch.tokens.to(model.cfg.device), fwd_hooks=half)
    """
    require_fit(model, batch)
    where, factors = as_site(site), _factors(model, factor)
    used = [factors[layer, where.heads_of(model, layer)] for layer in where.layers_of(model)]
    cuts = where.renormalize and bool((torch.cat(used) == 0).any())
    if cuts and factors.requires_grad:
        raise HookError(
            "a factor of 0 has no gradient before the softmax; begin with a small number such "
            "as 1e-6, or give al.Site(layers, renormalize=False)"
        )
    chosen = _checked_edges(batch, edges, "multiplied by 0" if cuts else None)
    return hooks_on_edges(model, batch, chosen, where, factors)


@checked
def detach_heads(model: HookedModel, site: SiteOrLayers = EVERYWHERE) -> list[Hook]:
    """Hooks that stop the gradient through heads, and leave every output as it was, bit for bit.

    They detach ``z``, the output of a head before the output projection: its pattern and values get
    a gradient of exactly 0, and all before them only that through the rest of the model. They act
    in all tokens, and so need no batch.

    Args:
        site: Layers, or an ``al.Site`` with heads alone; all layers and heads by default.

    Raises:
        HookError: A layer or head does not exist, or the site says how edges are cut.
        ModelError: The model was not prepared, or a layer does not hold the output of each head
            by itself (JetMoe; BitNet, whose norm mixes heads). A tiny pass finds out at first use.

    Examples:
        >>> detached = lambda batch: al.detach_heads(model, al.Site(1, heads=0))
        >>> results = al.run(model, batches, [al.SaliencyFlows()], hooks=detached, progress=False)
    """
    require_fit(model)
    of_layers = _separate_heads("detach_heads", model, site).items()
    count = model.cfg.n_heads
    return [(z_name(layer), DetachedHeads(count, tuple(heads))) for layer, heads in of_layers]


@checked
def replace_heads(
    model: HookedModel,
    batch: PromptBatch,
    outputs: float | Float[Tensor, "layer head d_head"],
    site: SiteOrLayers = EVERYWHERE,
    *,
    positions: edge_sets.Positions | edge_sets.PositionsOfBatch = edge_sets.target,
) -> list[Hook]:
    """Hooks that replace what heads give out, before the output projection.

    By default they are replaced at the target alone, and act at earlier tokens as before. Gradients
    flow into ``outputs``.

    Args:
        outputs: What is written, for every head of the model: a mean over other prompts
            (``HeadEffectsRecord.outputs``), or 0.0 to cut heads. Where layers have heads of
            several widths (Gemma 4), zeros follow the numbers of narrow heads.
        site: As for ``detach_heads``.
        positions: Where they are replaced, True and False [prompt, position] or a function of the
            batch, such as ``lambda batch: batch.attention_mask``; the target by default.

    Raises:
        HookError: As for ``detach_heads``, or ``outputs`` or ``positions`` do not fit.
        PromptError: The prompts do not fit the model.
        ModelError: As for ``detach_heads``, or the value biases of the model are folded.

    Examples:
        >>> cut = al.replace_heads(model, batch, 0.0, al.Site.of_heads([(0, 1), (2, 0)]))
        >>> logits = model.run_with_hooks(batch.tokens.to(model.cfg.device), fwd_hooks=cut)
    """
    require_fit(model, batch, "target_positions", of_values=True)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    if isinstance(outputs, Tensor) and tuple(outputs.shape[:2]) != (n_layers, n_heads):
        raise HookError(
            "outputs must have the shape (layer, head, d_head), beginning with "
            f"{(n_layers, n_heads)}; got {described(outputs)}"
        )
    heads = _separate_heads("replace_heads", model, site)
    rows, columns = where_written(batch, positions)
    if not len(rows):
        raise HookError("positions are False in all tokens of these prompts: nothing is replaced")
    at_target = torch.equal(columns, batch.target_rows)

    def hook_of(layer: int, chosen: list[int]) -> Hook:
        def replace_outputs(z: Tensor, hook: Any) -> Tensor:
            by_head = separate_heads(z, n_heads).clone()
            width, given = by_head.shape[-1], outputs
            if isinstance(given, Tensor):
                if given.shape[-1] < width or given[layer, chosen, width:].any():
                    raise HookError(
                        f"each head of layer {layer} gives out {width} numbers; got "
                        f"{given.shape[-1]} in outputs, of which only zeros may be too many"
                    )
                given = given[layer, chosen, :width].to(by_head)
            row, column = beside(z, rows[:, None], columns[:, None])
            by_head[row, column, chosen] = given
            return by_head.reshape(z.shape)

        kind = TargetHook if at_target else WholeHook
        return z_name(layer), kind(replace_outputs, batch.tokens)

    return [hook_of(layer, chosen) for layer, chosen in heads.items()]


def where_written(
    batch: PromptBatch, positions: edge_sets.Positions | edge_sets.PositionsOfBatch
) -> tuple[Int[Tensor, " chosen"], Int[Tensor, " chosen"]]:
    """The prompt of each position, and its place among the tokens that are run."""
    given = checked_positions(batch, "positions", positions, HookError)
    rows, columns = given.nonzero(as_tuple=True)
    if (columns < batch.first_query).any():
        raise HookError(
            f"positions before {batch.first_query}, from which on these prompts are run, cannot be "
            "changed; give whole prompts (batch.whole())"
        )
    return rows, columns - batch.first_query


@checked
def isolate_labels(
    model: HookedModel,
    batch: PromptBatch,
    site: SiteOrLayers = EVERYWHERE,
    *,
    whole_words: bool = False,
) -> list[Hook]:
    """Hooks that isolate the label words: these gather no information (the paper's section 2.2).

    It cuts the edges ``al.edges.wp``. An isolated position attends only to itself, and to the
    attention sinks of models that have them; after the softmax its row sums to less than 1.

    Args:
        batch: Prompts with known label words.
        site: Layers, or an ``al.Site`` with heads and more; all layers and heads by default.
        whole_words: Isolate all tokens of a label word, not the first alone as published.

    Raises:
        HookError, ModelError: As for ``block_edges``.
        PromptError: There are no label words, or the prompts do not fit the model.

    Examples:
        >>> hooks = al.isolate_labels(model, batch, range(3))
        >>> logits = model.run_with_hooks(batch.tokens.to(model.cfg.device), fwd_hooks=hooks)
    """
    words = edge_sets.segment(batch, "label") if whole_words else edge_sets.anchors(batch)
    return _isolate(model, batch, words, site)


@checked
def isolate_random(
    model: HookedModel,
    batch: PromptBatch,
    site: SiteOrLayers = EVERYWHERE,
    *,
    seed: int,
    whole_words: bool = False,
) -> list[Hook]:
    """The control of ``isolate_labels``: as many other positions (``al.edges.random_positions``).

    Arguments and errors that are not here are those of ``isolate_labels``.

    Args:
        seed: Number of the draw. A single draw is not a control: use about 10.
        whole_words: Draw as many positions as the label words have tokens.

    Raises:
        HookError: The demonstrations have fewer other positions than label words.

    Examples:
        >>> draws = range(10)
        >>> hooks = [al.hooks.isolate_random(model, batch, range(3), seed=draw) for draw in draws]
    """
    words = edge_sets.random_positions(batch, seed, whole_words=whole_words)
    return _isolate(model, batch, words, site)


@checked
def reweight_anchors(
    model: HookedModel, batch: PromptBatch, beta: Float[Tensor, "layer head anchor"] | LearnedBeta
) -> list[Hook]:
    """Hooks that multiply the target's attention to anchor i by ``exp(beta_i)`` (section 3.1).

    They act after the softmax, and rows are not normalised again. Gradients flow into ``beta``.

    Args:
        batch: Prompts with known label words and target.
        beta: Logarithm of the factor for each layer, head and anchor in order of appearance (0
            changes nothing), or the result of ``train_reweighting``.

    Raises:
        HookError: ``beta`` has another shape, is NaN or infinite, or is of other label words.
        PromptError: The prompts do not fit the model.
        ModelError: The model was not prepared, or its value biases are folded.

    Examples:
        >>> beta = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, len(demos))
        >>> hooks = al.reweight_anchors(model, batch, beta)
    """
    require_fit(model, batch, "label_positions", "target_positions", of_values=True)
    factors = beta if isinstance(beta, Tensor) else beta.of_prompts(batch)
    expected = (model.cfg.n_layers, model.cfg.n_heads, batch.label_positions.shape[1])
    if tuple(factors.shape) != expected:
        shape = f"(layer, head, anchor) = {expected}"
        raise HookError(f"beta must have the shape {shape}; got {tuple(factors.shape)}")
    if not (factors < torch.inf).all():
        raise HookError("beta must be numbers below infinity; got some that are NaN or infinite")
    rows = torch.arange(len(batch), device="cpu")[:, None]
    anchors = rows, batch.target_rows[:, None], batch.label_positions

    def hook_of(layer: int) -> Hook:
        def reweight(pattern: Tensor, hook: Any) -> Tensor:
            index = tuple(beside(pattern, *anchors))
            heads_last = pattern.movedim(1, -1).clone()  # so that the indexed axes are adjacent
            heads_last[index] = heads_last[index] * factors[layer].to(pattern).exp().T
            return heads_last.movedim(-1, 1)

        return pattern_name(layer), TargetHook(reweight, batch.tokens)

    if factors[layers_without_pattern(model)].any():
        raise HookError(
            f"layers {layers_without_pattern(model)} of {model.cfg.model_name} have no attention "
            "to re-weight; beta must be 0 there"
        )
    return [hook_of(layer) for layer in attention_layers(model)]


def hooks_on_edges(
    model: HookedModel,
    batch: PromptBatch,
    edges: EdgeSet,
    site: Site,
    factors: Float[Tensor, "layer head"] | None = None,
) -> list[Hook]:
    """Hooks of ``block_edges`` or ``scale_edges`` for checked edges of the batch."""
    require_fit(model, of_values=not site.renormalize)
    length = batch.tokens.shape[1]
    if site.keep_bos:
        if not batch.begins_with_bos:
            raise HookError("keep_bos=True, but prompts do not begin with a BOS; leave it out")
        edges = edges & ~edge_sets.from_first(in_longer_rows(batch, edges.shape[2]))
    name = scores_name if site.renormalize else pattern_name
    by_layer = isinstance(site.heads, Mapping)
    heads = None if by_layer or site.heads is None else tuple(site.heads_of(model, 0))
    given = edges.stored()
    of_prompts = given if given.shape[2] == length else given.over(length).stored()
    at_end = bool((batch.target_positions == length - 1).all())
    hook = EdgeHook(
        of_prompts,
        batch.tokens,
        site.renormalize,
        heads,
        written=given if at_end or given is not of_prompts else None,
    )

    def of_layer(layer: int) -> EdgeHook:
        changes: dict[str, Any] = {} if factors is None else {"factors": factors[layer]}
        if by_layer:
            changes["heads"] = tuple(site.heads_of(model, layer))
        return replace(hook, **changes) if changes else hook  # one hook makes one mask

    return [(name(layer), of_layer(layer)) for layer in site.layers_of(model)]


def _isolate(
    model: HookedModel, batch: PromptBatch, words: edge_sets.Positions, site: SiteOrLayers
) -> list[Hook]:
    require_fit(model, batch)
    if not words.any():
        raise PromptError("the batch has no label words, so that there is nothing to isolate")
    cut = edge_sets.between(words, batch.attention_mask)
    return hooks_on_edges(model, batch, cut, as_site(site))


def as_site(site: SiteOrLayers) -> Site:
    return site if isinstance(site, Site) else Site(site)


def _separate_heads(name: str, model: HookedModel, site: SiteOrLayers) -> dict[int, list[int]]:
    """The heads of each layer in which a function acts on the outputs of heads."""
    where = as_site(site)
    if where.keep_bos or not where.renormalize:
        raise HookError(
            f"{name} cuts no edges, so that it neither keeps BOS nor acts after the softmax; "
            f"give al.Site(layers, heads); got {where}"
        )
    heads = {layer: where.heads_of(model, layer) for layer in where.layers_of(model)}
    require_separate_heads(model, [*heads])
    return heads


def _checked_edges(
    batch: PromptBatch, edges: Edges | EdgesOfBatch, without_diagonal: str | None
) -> EdgeSet:
    """The edges as a set; ``without_diagonal`` is what an edge to itself cannot be, if refused."""
    given: Any = called("edges", edges, "the batch", batch) if callable(edges) else edges
    if holds_numbers(given) and given.ndim == 3:
        batch = in_longer_rows(batch, max(given.shape[2], batch.tokens.shape[1]))
    chosen = check_edges(batch, given, to_itself=True)
    diagonals = (of_rows.diagonal(rows.start, 1, 2) for rows, of_rows in chosen.pieces())
    if without_diagonal and any(diagonal.any() for diagonal in diagonals):
        raise HookError(
            f"edges from a position to itself cannot be {without_diagonal} before the softmax: the "
            "row may be left with nothing to attend to. Leave the diagonal out "
            "(edges & ~torch.eye(n, dtype=bool)) or give al.Site(layers, renormalize=False)"
        )
    if not chosen.has_edges():
        warn_user("nothing is cut or scaled: no prompt of this batch has such an edge")
    return chosen


def _factors(model: HookedModel, factor: Any) -> Float[Tensor, "layer head"]:
    shape = (model.cfg.n_layers, model.cfg.n_heads)
    is_tensor = isinstance(factor, Tensor)
    factors = factor if is_tensor else torch.tensor(float(factor), dtype=torch.double, device="cpu")
    if tuple(factors.shape) not in ((), shape):
        raise HookError(
            f"factor must be a number or a tensor with the shape (layer, head) = {shape}; "
            f"got {described(factors)}"
        )
    if not factors.is_floating_point() or not ((factors >= 0) & (factors < torch.inf)).all():
        given = factors.detach().tolist() if factors.is_floating_point() else factors.dtype
        raise HookError(
            "factor must be a float from 0 up, because attention is multiplied by it: 0 cuts, 1 "
            f"changes nothing; got {given}"
        )
    return factors.expand(shape)
