"""The usual series of sites (layers and heads) for a sweep, by name.

Layers without attention, which some models have, do not count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from ..errors import HookError
from ..hooks import Site
from ..models.hooked import HookedModel, attention_layers, layer_numbers
from ..system.arguments import checked


@checked
def first_and_last(model: HookedModel, depths: Iterable[int] = (1, 3, 5, 7)) -> dict[str, Site]:
    """The first and the last n layers, for each depth n (the paper's Figure 4 and its appendix).

    Raises:
        HookError: A depth is below 1, or the model has fewer layers.

    Examples:
        >>> list(al.sites.first_and_last(model, [1, 2]))
        ['first layer', 'last layer', 'first 2 layers', 'last 2 layers']
    """
    sites, layers = {}, attention_layers(model)
    is_in_all = len(layers) == model.cfg.n_layers
    for depth in depths:
        if not 1 <= depth <= len(layers):
            raise HookError(f"depths are from 1 to {len(layers)} layers; got {depth!r}")
        name = "layer" if depth == 1 else f"{depth} layers"
        sites[f"first {name}"] = Site(range(depth) if is_in_all else layers[:depth])
        sites[f"last {name}"] = Site(range(-depth, 0) if is_in_all else layers[-depth:])
    return sites


@checked
def windows(model: HookedModel, width: int) -> dict[str, Site]:
    """Every window of ``width`` adjacent layers, from the first to the last.

    Raises:
        HookError: ``width`` is not from 1 to the number of layers.

    Examples:
        >>> list(al.sites.windows(model, 2))[:2]
        ['layers 0 to 1', 'layers 1 to 2']
    """
    every, layers = range(model.cfg.n_layers), attention_layers(model)
    count = len(layers)
    if not 1 <= width <= count:
        raise HookError(f"a window has from 1 to {count} layers; got {width!r}")
    chosen: Sequence[int] = every if count == len(every) else layers
    windows = [chosen[k : k + width] for k in range(count - width + 1)]
    return {f"layers {window[0]} to {window[-1]}": Site(window) for window in windows}


@checked
def single_heads(model: HookedModel, layers: Iterable[int] | int) -> dict[str, Site]:
    """Each head of ``layers`` as a site.

    Raises:
        HookError: A layer does not exist.

    Examples:
        >>> list(al.sites.single_heads(model, 0))[:2]
        ['head 0.0', 'head 0.1']
    """
    return {
        f"head {layer}.{head}": Site(layer, head)
        for layer in layer_numbers(model, layers)
        for head in range(model.cfg.n_heads)
    }


@checked
def random_heads(model: HookedModel, site: Site, seed: int) -> Site:
    """As many random heads of the same layers as a site has: its control (``EdgeSweep``).

    They are drawn from all heads of each layer, the site's own too.

    Raises:
        HookError: A layer or head does not exist.

    Examples:
        >>> al.sites.random_heads(model, al.Site(heads={0: [0, 1], 2: 1}), seed=0).layers_of(model)
        [0, 2]
    """
    draw, every = Random(seed), range(model.cfg.n_heads)
    counts = {layer: len(site.heads_of(model, layer)) for layer in site.layers_of(model)}
    heads = {layer: sorted(draw.sample(every, count)) for layer, count in counts.items()}
    return replace(site, layers=None, heads=heads)
