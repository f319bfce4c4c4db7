"""Centroids of routing attention: where they start, and three ways to move them.

    a(x)         = the centroid with the largest product x . centroid, by head
    "paper"      centroid' = decay centroid + (1 - decay)/2 (sum of its q + sum of its k)
    "ema"        counts' = decay counts + (1 - decay) n;  sums' = decay sums + (1 - decay) sum x;  centroid' = sums' / counts'
    "means"      centroid' = decay centroid + (1 - decay) unit(sum of its unit(q) and unit(k))

Centroids are moved outside the gradient; tokens of all batch entries count.  q and k are what meets the centroids in
``routing_attention``: normalised, and projected where it projects.

Axes: ... batch, h head, t position, c cluster, d channel.

Source: Roy et al. 2020, arXiv:2003.05997, algorithm 1 and section 4.1; the moving average as in the code released with it.
"""

import math
from typing import Any

import numpy as np

from refattn.arrays import (
    broadcast_leading,
    flatten_leading,
    is_array,
    is_bool,
    namespace,
    require_axes,
    require_integer,
    require_number,
    require_one_of,
    to_namespace,
)
from refattn.attention.blocks.routing_members import nearest_centroid, normalise
from refattn.contraction import einsum
from refattn.mechanism import function
from refattn.records import Result

__all__ = ["initial_centroids", "update_centroids"]

METHODS = ("paper", "ema", "means")
COUNT_EPS = 1e-5


def initial_centroids(
    rng: "np.random.Generator",
    *,
    h: int | None = None,
    c: int,
    d: int | None = None,
    normalize: str | None = "layer",
    tokens: Any = None,
    iterations: int = 10,
) -> Any:
    """Centroids (h, c, d) to start from: normalised standard normal vectors, or means of tokens.

    Parameters
    ----------
    rng : numpy.random.Generator
    h, c, d : int
        Heads, clusters, channels; h and d are those of the tokens where these are given.
    normalize : {"layer", "l2", None}
        What is done to the normal vectors.
    tokens : array (..., h, t, d), optional
        What will meet the centroids: c different tokens of each head, drawn by ``rng``, then ``iterations`` of the update
        "means" with decay 0 (k-means on the unit sphere).
    iterations : int

    Returns
    -------
    array (h, c, d)
        Of the tokens' library and dtype, else NumPy float64.

    Raises
    ------
    ValueError
        More clusters than tokens; h or d missing.

    Examples
    --------
    >>> import numpy as np
    >>> tokens = np.repeat(np.eye(3), 4, axis=0)[None]
    >>> np.sort(initial_centroids(np.random.default_rng(1), c=3, tokens=tokens)[0].argmax(-1))
    array([0, 1, 2])
    """
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng is a {type(rng).__name__}: expected a numpy.random.Generator")
    c = require_integer("c", c, minimum=1)
    require_one_of("normalize", normalize, ("layer", "l2", None))
    if tokens is None:
        if h is None or d is None:
            raise ValueError("initial_centroids needs h and d, or tokens that have them")
        h, d = require_integer("h", h, minimum=1), require_integer("d", d, minimum=1)
        return normalise(rng.standard_normal((h, c, d)), normalize)[0]
    sizes = require_axes({n: x for n, x in (("h", h), ("d", d)) if x is not None}, tokens=(tokens, "... h t d"))
    xp = namespace(tokens)
    lead = tuple(tokens.shape[:-3])
    flat = xp.permute_dims(flatten_leading(tokens, 3, lead), (1, 0, 2, 3))
    flat = xp.reshape(flat, (sizes["h"], math.prod(lead) * tokens.shape[-2], sizes["d"]))  # all tokens of a head
    if flat.shape[1] < c:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}: {flat.shape[1]} tokens a head, fewer than c = {c}")
    drawn = [rng.choice(flat.shape[1], c, replace=False) for _ in range(sizes["h"])]
    found = xp.stack([xp.take(flat[n, ...], to_namespace(i, xp, like=flat), axis=0) for n, i in enumerate(drawn)])
    found = normalise(found, "l2")[0]
    for _ in range(require_integer("iterations", iterations, minimum=0)):
        found = update_centroids.forward(found, tokens, decay=0.0, method="means").centroids
    return found


def _update_forward(
    centroids: Any,
    q: Any,
    k: Any = None,
    *,
    decay: float,
    method: str = "paper",
    state: Any = None,
    query_mask: Any = None,
    key_mask: Any = None,
) -> tuple[Result, None]:
    """Centroids moved towards the tokens that are nearest to them; no gradient.

    Parameters
    ----------
    centroids : array (h, c, d)
    q : array (..., h, t, d)
    k : array (..., h, t, d), optional
        Left out: the queries are the keys.
    decay : float
        In [0, 1]; the paper uses 0.999.
    method : {"paper", "ema", "means"}
        "paper": adds *sums*, so that the centroid of a cluster of n tokens grows towards n times their mean; membership ranks
        the tokens of one centroid and does not notice, the nearest centroid of a token and the loss do.  Queries that are
        keys count in full.
        "ema": running counts and sums.  It starts, as the released code does, with counts of 0 and the centroids as
        sums, so that one step gives the mean of the tokens plus about decay / ((1 - decay) n) times the old centroid: 2 times
        for n = 512 tokens and decay 0.999, 200 times for 5 tokens, 1e5 for a cluster that got none (whose count is the 1e-5
        of the smoothing).  The nearest centroid and the loss then go by those lengths.  A ``state`` of counts that are not
        0 avoids it.  Keys of their own make a second step; both go by the centroids as given.
        "means": the unit mean of the unit members; a centroid without members stays.  Not normalised again: it shrinks
        a little whenever the direction turns.
    state : (array (h, c), array (h, c, d)), optional
        Counts and sums of "ema".
    query_mask, key_mask : bool arrays (..., t), optional
        False: no token.

    Returns
    -------
    centroids : array (h, c, d)
    state : (counts, sums), or None for the other methods

    Raises
    ------
    ValueError
        Another width, a decay outside [0, 1], a state without use.
    """
    require_one_of("method", method, METHODS)
    decay = require_number("decay", decay, minimum=0, maximum=1)
    sizes = require_axes(centroids=(centroids, "h c d"), q=(q, "... h t d"))
    if sizes["c"] == 0:
        raise ValueError(f"centroids has shape {tuple(centroids.shape)}: expected at least one centroid")
    xp = namespace(centroids, q)
    if k is not None:
        require_axes({n: sizes[n] for n in "hd"}, k=(k, "... h t d"))
    if state is not None:
        if method != "ema":
            raise ValueError(f"state is given: method={method!r} has none")
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise TypeError(f"state is a {type(state).__name__}: expected (counts, sums)")
        require_axes({n: sizes[n] for n in "hcd"}, **{"state[0]": (state[0], "h c"), "state[1]": (state[1], "h c d")})
    sources = [("q", q, query_mask)] + ([] if k is None else [("k", k, key_mask)])
    if method == "means":
        sources = [(name, normalise(x, "l2")[0], keep) for name, x, keep in sources]
    added = [_assigned(name, x, keep, centroids, xp) for name, x, keep in sources]
    if method == "paper":
        both = added * 2 if k is None else added
        total = both[0][1] + both[1][1]
        return Result(centroids=decay * centroids + (1 - decay) / 2 * total, state=None), None
    if method == "means":
        count, total = (sum(part[n] for part in added) for n in (0, 1))
        mean, _ = normalise(total, "l2")
        mean = xp.where(count[..., None] > 0, mean, centroids)
        return Result(centroids=decay * centroids + (1 - decay) * mean, state=None), None
    counts, sums = (xp.zeros_like(xp.sum(centroids, axis=-1)), centroids) if state is None else state
    for count, total in added:
        counts = decay * counts + (1 - decay) * count
        sums = decay * sums + (1 - decay) * total
    whole = xp.sum(counts, axis=-1, keepdims=True)
    counted = whole > 0  # a head of which no token was counted yet keeps its centroids
    whole = xp.where(counted, whole, xp.ones_like(whole))
    smooth = (counts + COUNT_EPS) / (whole + sizes["c"] * COUNT_EPS) * whole
    moved = xp.where(counted[..., None], sums / smooth[..., None], centroids)
    return Result(centroids=moved, state=(counts, sums)), None


def _assigned(name: str, x: Any, keep: Any, centroids: Any, xp: Any) -> tuple[Any, Any]:
    """How many tokens are nearest to each centroid (h, c), and their sum (h, c, d)."""
    lead = tuple(x.shape[:-3])
    flat = flatten_leading(x, 3, lead)
    b, h, t, d = flat.shape
    if keep is not None:
        mask = {"q": "query_mask", "k": "key_mask"}[name]
        if not is_array(keep) or not is_bool(keep.dtype):
            raise TypeError(f"{mask} is {type(keep).__name__}: expected a bool array (..., t), False = no token")
        require_axes({"t": t}, **{mask: (keep, "... t")})
        broadcast_leading(**{name: (x, 3), mask: (keep, 1)})
        keep = xp.broadcast_to(flatten_leading(keep, 1, lead), (b, t))
    rows = xp.reshape(xp.permute_dims(flat, (1, 0, 2, 3)), (h, b * t, d))
    counts, sums = [], []
    for n in range(h):
        nearest = nearest_centroid(rows[n, ...], centroids[n, ...])
        member = xp.arange(centroids.shape[-2])[:, None] == nearest[None, :]
        own = rows[n, ...]
        if keep is not None:
            alive = xp.reshape(keep, (b * t,))
            member = xp.logical_and(member, alive[None, :])
            own = xp.where(alive[:, None], own, xp.zeros_like(own))
        member = xp.astype(member, own.dtype)
        counts.append(xp.sum(member, axis=-1))
        sums.append(einsum("ct,td->cd", member, own))
    if not h:
        return xp.zeros_like(xp.sum(centroids, axis=-1)), xp.zeros_like(centroids)
    return xp.stack(counts), xp.stack(sums)


update_centroids = function(
    _update_forward,
    None,  # centroids move outside the gradient
    name="update_centroids",
    differentiable=(),
    floating=("centroids", "q", "k"),
    outputs=("centroids",),
    storage=("centroids",),
    primary=("centroids",),
)
