"""Random calls of every mechanism: shapes (axes of 0 and 1 too), options, values, dtypes, layouts, algorithms, namespaces.

A call is a function of (mechanism, seed) alone.  `DRAWN` says which options each mechanism's draw knows; a test holds it
against the signatures, so that a new option has to be drawn, or named in `NOT_DRAWN` with the reason.
"""

import dataclasses
import zlib

import numpy as np
from contract.score_mods import bend, bend_with_derivative, tilt

import refattn as ra
from refattn import patterns

NOT_DRAWN = {
    "compute_dtype": "the complex step asks for it",
    "rng": "rotations are drawn instead",
    "keep_weights": "held by the contract suite",
    "keep_terms": "held by the contract suite",
    "through_memory": "always on: without it the gradient of memories is no derivative",
}


@dataclasses.dataclass
class Call:
    mechanism: str
    seed: int
    arguments: dict
    values: str = "normal"
    amplitude: float = 1.0
    dtype: str = "float64"
    algorithm: str = "auto"
    namespace: str = "numpy"
    layout: int = 0

    def __str__(self):
        shown = []
        for n, x in self.arguments.items():
            if isinstance(x, np.ndarray):
                shown.append(f"{n}: {x.dtype}{x.shape}" if x.size > 8 or x.dtype.kind == "f" else f"{n}={x.tolist()}")
            elif x is not None:
                shown.append(
                    f"{n}={getattr(x, '__name__', x)!r}" if not isinstance(x, tuple) or len(str(x)) < 60 else n
                )
        how = (
            f"{self.values} values, {self.dtype}, algorithm={self.algorithm!r}, {self.namespace}, layout {self.layout}"
        )
        return f"{self.mechanism} ({how})\n    " + ", ".join(shown)


class Draw:
    """Random choices for one call."""

    def __init__(self, rng):
        self.rng = rng

    def chance(self, p):
        return bool(self.rng.random() < p)

    def one(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def size(self, *likely, empty=0.03):
        """One of the likely sizes, 1 at times, 0 rarely."""
        p = self.rng.random()
        return 0 if p < empty else 1 if p < 0.15 else self.one(*likely)

    def bools(self, *shape, p=0.7):
        return self.rng.random(shape) < p

    def normal(self, *shape):
        return self.rng.standard_normal(shape)

    def lengths(self, b, n):
        return [int(x) for x in self.rng.integers(0, n + 1, b)]

    def some(self, shape):
        """The shape with some axes of size 1, and leading ones left out."""
        short = tuple(1 if self.chance(0.2) else s for s in shape)
        return short[1:] if self.chance(0.3) else short


def visibility(d, b, h, q, k, *, same=False):
    """mask, pattern, causal, align, window, lengths, segments of softmax attention."""
    o = {}
    if d.chance(0.25):
        o["mask"] = d.bools(*d.some((b, h, q, k)))
    if d.chance(0.15):
        o["pattern"] = d.one(
            patterns.dilated(2), patterns.dense(d.bools(h, q, k)), patterns.prefix(2), ~patterns.dilated(3),
            patterns.window(2, 1, align=1), patterns.causal(align=0) | patterns.prefix(1),
        )  # fmt: skip
    if d.chance(0.35):
        o["causal"] = True
    if d.chance(0.2):
        o["window"] = (d.one(None, 0, 1, 3, 10**6), d.one(None, 0, 2))
    if d.chance(0.25):
        o["key_lengths"] = d.lengths(b, k)
    if d.chance(0.2):
        o["query_lengths"] = d.lengths(b, q)
    if d.chance(0.1):
        o["query_segments"], o["key_segments"] = d.rng.integers(0, 2, (b, q)), d.rng.integers(0, 2, (k,))
    needed = not same or "key_lengths" in o or "query_lengths" in o or d.chance(0.3)
    if needed and (o.get("causal") or "window" in o):
        o["align"] = d.one("upper_left", "lower_right", 0, 1, -1, k - q)
    return o


def softmax(d, b, h, q, k, *, same=False, sinks=True):
    """All shared options."""
    o = visibility(d, b, h, q, k, same=same)
    if d.chance(0.25):
        bias = d.normal(*d.some((b, h, q, k)))
        o["bias"] = np.where(d.rng.random(bias.shape) < 0.2, -np.inf, bias) if d.chance(0.4) else bias
    if d.chance(0.3):
        o["scale"] = d.one(0.5, 1.0, 0.0, -0.7)
    if d.chance(0.2):
        o["softcap"] = d.one(1.3, 5.0)
        o["softcap_after_bias"] = d.chance(0.5)
    if d.chance(0.15):
        o["alibi_slopes"] = d.rng.random(h)
        o.setdefault("align", d.one("upper_left", "lower_right", 1))
    if sinks and d.chance(0.2):
        o["sinks"] = d.normal(*d.one((h,), (h, 2)))
        o["lse_includes_sinks"] = d.chance(0.6)
    if d.chance(0.15):
        o["dropout_mask"], o["dropout_rate"] = d.bools(*d.some((b, h, q, k))), d.one(0.25, 0.5)
    if d.chance(0.12):
        o["score_mod"] = d.one(tilt, bend, bend_with_derivative)
    return o


def listed(d, b, g, h, q, k):
    """Keys or blocks of keys for every query: some absent, some twice, some beyond the last."""
    width = d.one(0, 1, 2, 5)
    shape = (*d.one((), (1,), (b,)), d.one(1, g, h), q, width)
    o = {"duplicates": "multiset"} if d.chance(0.4) else {}
    if d.chance(0.5):
        return {"indices": d.rng.integers(-1, k + 2, shape), **o}
    block = d.one(1, 2, 3, 20)
    return {"block_indices": d.rng.integers(-1, -(-k // block) + 1, shape), "block": block, **o}


def head_sizes(d):
    g = d.size(1, 2, 3, empty=0.01)
    return g, g * d.one(1, 1, 2, 3)


def scaled_dot_product(d):
    b, (g, h), q, k = d.size(1, 2), head_sizes(d), d.size(2, 3, 5, 9), d.size(2, 4, 7, 12)
    o = softmax(d, b, h, q, k)
    if d.chance(0.2):
        o["head_map"] = "tile"
    o |= listed(d, b, g, h, q, k) if d.chance(0.2) else {}
    return {"b": b, "h": h, "g": g, "q": q, "k": k, "d": d.size(2, 3), "e": d.size(2, 3)}, o


def differential(d):
    b, (g, h), q, k = d.size(1, 2), head_sizes(d), d.size(2, 3, 5), d.size(2, 4, 7)
    o = softmax(d, b, 2 * h, q, k, sinks=False)
    if getattr(o.get("pattern"), "heads", 1) != 1:
        del o["pattern"]  # one for each head is not taken
    o |= {"head_map": "tile"} if d.chance(0.2) else {}
    o |= {"pairs": "halves"} if d.chance(0.4) else {}
    o |= {"two_keys": False} if d.chance(0.4) else {}
    o |= {"lam": d.normal(*d.one((1, 1), (h, 1), (b, h, q)))} if d.chance(0.5) else {}
    o |= listed(d, b, g, 2 * h, q, k) if d.chance(0.2) else {}
    return {"b": b, "h": h, "g": g, "q": q, "k": k, "d": d.size(2, 3), "e": d.size(2, 3)}, o


def forgetting(d):
    sizes, o = scaled_dot_product(d)
    o.pop("causal", None)
    gates = np.log(d.rng.random((*d.one((), (sizes["b"],)), sizes["h"], sizes["k"])))
    o["log_forget"] = np.where(d.rng.random(gates.shape) < d.one(0.0, 0.2), -np.inf, gates)
    return sizes, o


def multi_head(d):
    b, (g, h), q = d.size(1, 2), head_sizes(d), d.size(2, 3, 5)
    k = q if d.chance(0.3) else d.size(2, 4, 6)
    o = softmax(d, b, h, q, k)
    o |= {"zero_attention": True} if d.chance(0.2) else {}
    o |= {"extra_key": True, "extra_value": True} if d.chance(0.25) else {}
    o |= {"head_map": "tile"} if d.chance(0.2) else {}
    o |= listed(d, b, g, h, q, k) if d.chance(0.2) else {}
    shared = d.one(0, 0, 1, 2) if q == k else d.one(0, 1)
    o |= dict.fromkeys(("x_v", "x_k")[:shared])
    o |= dict.fromkeys([n for n in ("b_q", "b_k", "b_v", "b_o") if d.chance(0.4)])
    return {
        "b": b,
        "h": h,
        "g": g,
        "q": q,
        "k": k,
        "d": d.size(2, 3),
        "e": d.size(2, 3),
        "m": d.size(3, 4, empty=0.0),
    }, o


def talking_heads(d):
    b, h, q, k = d.size(1, 2), d.size(2, 3, empty=0), d.size(2, 3, 5), d.size(2, 4, 7)
    o = softmax(d, b, h, q, k, sinks=False)
    sizes = {"b": b, "h": h, "x": h, "y": h, "q": q, "k": k, "d": d.size(2, 3, empty=0), "e": d.size(2, 3)}
    for n, letter in (("logits_projection", "x"), ("weights_projection", "y")):
        if d.chance(0.3):
            o[n] = None
        else:
            sizes[letter] = d.size(2, 3, 4, empty=0)
    o |= {n: True for n in ("query_logits", "key_logits", "query_weights", "key_weights") if d.chance(0.25)}
    return sizes, o


def sparse_transformer(d):
    b, (g, h), t = d.size(1, 2), head_sizes(d), d.size(3, 7, 12, 40)
    o = softmax(d, b, h, t, t, same=True)
    o.pop("pattern", None)
    stride = d.one(1, 2, 3, 5, 50)
    o["heads"] = d.one("split", "merged", "first", "second", "interleaved")
    if o["heads"] == "interleaved":
        o["layer"] = d.one(0, 1, 5)
    if d.chance(0.4):
        summary = d.one(1, 2) if stride > 1 else 1
        o |= {"pattern": "fixed", "summary": summary}
        if d.chance(0.5) and stride > summary:
            o["summary_offsets"] = [int(x) for x in d.rng.integers(0, stride - summary + 1, h)]
    elif d.chance(0.3):
        o["variant"] = "code"
    if d.chance(0.2):
        o["head_map"] = "tile"
    return {"b": b, "h": h, "g": g, "t": t, "d": d.size(2, 3), "e": d.size(2, 3), "stride": stride}, o


def local(d):
    b, (g, h), t = d.size(1, 2), head_sizes(d), d.size(3, 7, 12, 40)
    o = softmax(d, b, h, t, t, same=True)
    o |= {"look_backward": d.one(0, 1, 2), "look_forward": d.one(0, 0, 1), "exact": d.chance(0.4)}
    if d.chance(0.2):
        o["head_map"] = "tile"
    return {"b": b, "h": h, "g": g, "t": t, "d": d.size(2, 3), "e": d.size(2, 3), "block": d.one(1, 2, 3, 5, 60)}, o


def topk(d):
    b, (g, h), q, k = d.size(1, 2), head_sizes(d), d.size(2, 3, 5, 9), d.size(2, 4, 7, 12, empty=0)
    o = softmax(d, b, h, q, k)
    o |= {"head_map": "tile"} if d.chance(0.2) else {}
    given = listed(d, b, g, h, q, k) if d.chance(0.3) else {}
    if "indices" in given:
        o |= given
    else:
        o["count"] = min(d.one(1, 2, 3, 30), k)
    return {"b": b, "h": h, "g": g, "q": q, "k": k, "d": d.size(2, 3), "e": d.size(2, 3)}, o


def adaptive_span(d):
    b, h, q = d.size(1, 2), d.size(1, 2, empty=0.01), d.size(2, 3, 6)
    span = d.one(1, 3, 5, 9)
    k = q + d.one(span, 0, 2, 12)
    spans = (span * d.rng.random(d.one((h,), (h, q), (b, h, q)))).astype(np.float16).astype(np.float64)
    spans = np.where(
        2 * spans % 1 == 0, spans + span / 64, spans
    )  # in any dtype no mask stands at a corner of its ramp
    o = {"max_span": span, "ramp": d.one(1.5, 2.5, 32.0), "span": spans}
    o |= {"mask": d.bools(*d.some((b, h, q, k)))} if d.chance(0.3) else {}
    o |= {"scale": d.one(0.5, 1.0)} if d.chance(0.3) else {}
    o |= {"distance_origin": 0} if d.chance(0.3) else {}
    o |= {"renormalize_eps": 0.01} if d.chance(0.3) else {}
    if d.chance(0.5):
        o["key_positions"] = None
    sizes = {"b": b, "h": h, "q": q, "k": k, "d": d.size(2, 3, empty=0), "e": d.size(2, 3), "n": d.one(0, 0, 2)}
    return sizes, o


def transformer_xl(d):
    b, h, q = d.size(1, 2), d.size(1, 2, empty=0.01), d.size(2, 3, 6)
    k = q + d.one(0, 1, 4)
    o = {"causal": d.chance(0.7)}
    if o["causal"] and k > q and d.chance(0.3):
        o["same_length"] = d.one(True, 1, 3)
    o |= {"mask": d.bools(*d.some((b, h, q, k)))} if d.chance(0.3) else {}
    o |= {"bias": d.normal(*d.some((b, h, q, k)))} if d.chance(0.3) else {}
    o |= {"scale": d.one(0.5, 1.0, 0.0)} if d.chance(0.3) else {}
    o |= d.one({}, {}, {"position_bias": True}, {"absolute_q": True}, {"u": None, "w": None}, {"r": None, "w": None})
    return {"b": b, "h": h, "q": q, "k": k, "d": d.size(2, 3, empty=0), "e": d.size(2, 3)}, o


def compressive(d):
    q, k, n = d.size(2, 3, empty=0), d.one(0, 2, 3), d.one(0, 1, 2)
    b, h = d.size(1, 2), d.size(1, 2, empty=0.0)
    o = {"through_memory": True}
    o |= {"compressed_positions": d.one("span_end", "span_mid"), "rate": d.one(1, 2, 3)} if d.chance(0.4) else {}
    o |= {"mask": d.bools(*d.some((b, h, q, n + k + q)))} if d.chance(0.3) else {}
    o |= {"bias": d.normal(*d.some((b, h, q, n + k + q)))} if d.chance(0.3) else {}
    o |= {"scale": d.one(0.5, 1.0)} if d.chance(0.3) else {}
    o |= {"same_length": True} if d.chance(0.2) and n + k else {}
    o |= d.one({}, {}, {"w_o": None}, {"r": None, "w": None}, {"u": None, "w": None})
    return {
        "b": b,
        "h": h,
        "q": q,
        "k": k,
        "n": n,
        "m": d.one(2, 4),
        "d": d.size(2, 3, empty=0),
        "e": d.size(2, 3, empty=0),
    }, o


def lsh(d):
    b, h, t = d.size(1, 2), d.size(1, 2, empty=0.01), d.size(3, 8, 13, 24, empty=0)
    hashes, chunk = d.one(1, 2, 3), d.one(2, 4, 8)
    o = {"hashes": hashes, "chunk": chunk, "causal": d.chance(0.5), "before": d.one(0, 1, 2), "after": d.one(0, 0, 1)}
    o |= {"within_bucket": d.chance(0.5), "duplicates": d.one("union", "multiset", "trax1")}
    o |= {"self_attention": d.one("last_resort", "never", "always")} if d.chance(0.4) else {}
    o |= {"wrap": "global"} if t % chunk == 0 and d.chance(0.4) else {}
    o |= {"key_norm": "rms", "norm_eps": 0.01} if d.chance(0.2) else {}
    o |= {"mask": d.bools(*d.one((b, t), (t,)))} if d.chance(0.3) else {}
    o |= {"padding_bucket": True} if "mask" in o and d.chance(0.3) else {}
    o |= {"short": "full"} if d.chance(0.15) and "buckets" not in o else {}
    o |= {"scale": d.one(0.5, 1.0)} if d.chance(0.3) else {}
    o |= {"pattern": patterns.dense(d.bools(h, t, t))} if d.chance(0.15) else {}
    if d.chance(0.2):
        o["dropout_mask"], o["dropout_rate"] = d.bools(*d.some((b, h, t, t))), 0.25
    if d.chance(0.6):
        o["buckets"], o["n_buckets"] = d.rng.integers(0, d.one(1, 2, 4), (b, h, hashes, t)), 4
    return {"b": b, "h": h, "t": t, "d": d.one(2, 3, 4), "e": d.size(1, 3)}, o


def routing(d):
    b, h, t, c = d.size(1, 2), d.size(1, 2, empty=0.01), d.size(4, 8, 12, empty=0), d.one(1, 2, 3)
    o = {"causal": d.chance(0.5), "cluster_size": d.one(1, 2, (2, 3), 30)}
    o |= {"k": True} if d.chance(0.5) else {}
    o |= {"normalize": d.one("layer", "l2", None), "cluster_normalize": d.one("same", "layer", "l2", None)}
    o |= {"key_norm": "l2"} if d.chance(0.2) else {}
    o |= {"projection": True} if d.chance(0.2) else {}
    o |= {"causal_by": "rank"} if d.chance(0.2) else {}
    o |= {"self_attention": d.one("always", "last_resort", "never")}
    o |= {"query_mask": d.bools(b, t)} if d.chance(0.25) else {}
    o |= {"key_mask": d.bools(b, t)} if d.chance(0.25) else {}
    o |= {"memory_keys": True} if d.chance(0.2) else {}
    o |= {"members": True} if d.chance(0.3) else {}
    o |= {"average_eps": 0.3} if d.chance(0.2) else {}
    o |= {"scale": d.one(0.5, 1.0)} if d.chance(0.3) else {}
    o |= {"pattern": patterns.dense(d.bools(h, t, t))} if d.chance(0.15) else {}
    if d.chance(0.2):
        o["dropout_mask"], o["dropout_rate"] = d.bools(*d.some((b, h, t, t))), 0.25
    if d.chance(0.2):
        o |= d.one({"relative_keys": True}, {"relative_keys": True, "relative_values": True})
    return {"b": b, "h": h, "t": t, "c": c, "d": d.one(3, 4), "e": d.size(1, 3), "n": d.one(1, 2)}, o


def linear(d):
    b, h, k = d.size(1, 2), d.size(1, 2, empty=0.01), d.size(3, 7, 20)
    o = {"causal": d.chance(0.5), "form": d.one(*FORMS), "chunk": d.one(1, 3, 64), "normalize": d.chance(0.7)}
    o |= {"feature_map": "identity"} if d.chance(0.3) else {}
    o |= {"state": True, "normalizer": True} if d.chance(0.3) else {}
    o |= {"normalize_eps": 0.5} if d.chance(0.3) else {}
    o |= {"scale": d.one(0.5, 1.0)} if d.chance(0.3) else {}
    o |= {"key_lengths": d.lengths(b, k)} if d.chance(0.3) else {}
    return {"b": b, "h": h, "q": d.size(2, 5), "k": k, "d": d.size(2, 3, empty=0), "e": d.size(2, 3)}, o


def performer(d):
    b, h, k = d.size(1, 2), d.size(1, 2, empty=0.01), d.size(3, 7, 20)
    o = {"causal": d.chance(0.5), "chunk": d.one(1, 3, 64), "kernel": d.one("softmax", "softmax", "relu")}
    o |= {"eps": d.one(0.1, 0.3)} if d.chance(0.5) else {}
    o |= {"key_sum_eps": 0.4} if d.chance(0.2) else {}
    return {
        "b": b,
        "h": h,
        "q": d.size(2, 5),
        "k": k,
        "d": d.size(2, 3, empty=0),
        "e": d.size(2, 3),
        "n": d.one(1, 4),
    }, o


def efficient(d):
    b, k = d.size(1, 2), d.size(3, 7)
    o = {"key_lengths": d.lengths(b, k)} if d.chance(0.4) else {}
    return {"b": b, "h": d.size(1, 2), "q": d.size(2, 5), "k": k, "d": d.size(2, 3, empty=0), "e": d.size(2, 3)}, o


def linformer(d):
    o = {"scale": d.one(0.5, 1.0)} if d.chance(0.4) else {}
    sizes = {"b": d.size(1, 2), "h": d.size(1, 2), "q": d.size(2, 5), "k": d.size(3, 7), "n": d.size(2, 4, empty=0)}
    return sizes | {"d": d.size(2, 3), "e": d.size(2, 3)}, o


def nystrom(d):
    landmarks = d.one(1, 2, 3)
    o = {"landmarks": landmarks, "iterations": d.one(0, 1, 2, 6)}
    o |= {"pinv_scale": "batch"} if d.chance(0.3) else {}
    q, k = landmarks + d.one(0, 1, 4), landmarks + d.one(0, 2, 5)
    return {"b": d.size(1, 2), "h": d.size(1, 2), "q": q, "k": k, "d": d.size(2, 3, empty=0), "e": d.size(2, 3)}, o


def sinkhorn(d):
    block = d.one(1, 2, 3)
    o = {"temperature": d.one(0.75, 1.3), "iterations": d.one(1, 1, 4), "causal": d.chance(0.5)}
    o |= {"noise": None} if d.chance(0.5) else {}
    o |= {"scale": d.one(0.5, 1.0)} if d.chance(0.3) else {}
    sizes = {"b": d.size(1, 2), "h": d.size(1, 2), "t": block * d.one(1, 2, 4), "block": block}
    return sizes | {"d": d.size(2, 3), "e": d.size(2, 3)}, o


def longformer(d):
    b, t = d.size(1, 2), d.size(3, 8, 20, empty=0)
    o = {"window": (d.one(0, 1, 3, None), d.one(0, 2, None))}
    o |= dict.fromkeys([n for n in ("q_global", "k_global", "v_global") if d.chance(0.3)])
    o |= {"scale": d.one(0.5, 1.0)} if d.chance(0.3) else {}
    if d.chance(0.4):
        o["global_tokens"] = d.bools(*d.one((b, t), (t,)), p=0.3)
    if d.chance(0.3):
        o |= {"query_lengths": d.lengths(b, t), "key_lengths": d.lengths(b, t), "align": "upper_left"}
    return {
        "b": b,
        "h": d.size(1, 2, empty=0.01),
        "t": t,
        "d": d.size(2, 3),
        "e": d.size(2, 3),
        "n": min(t, d.one(0, 2)),
    }, o


def bigbird(d):
    b, h, t, block = d.size(1, 2), d.size(1, 2, empty=0.01), d.size(4, 9, 21, empty=0), d.one(1, 2, 3, 8)
    n = -(-t // block)
    o = {"window_blocks": d.one(0, 1, 2), "global_blocks": (d.one(0, 1, 2), d.one(0, 1))}
    o |= {"scale": d.one(0.5, 1.0)} if d.chance(0.3) else {}
    o |= {"key_lengths": d.lengths(b, t)} if d.chance(0.3) else {}
    o |= {"query_lengths": d.lengths(b, t)} if d.chance(0.2) else {}
    o |= {"random_blocks": d.rng.integers(-1, n, (h, n, d.one(1, 2, 4)))} if d.chance(0.4) else {}
    return {"b": b, "h": h, "t": t, "d": d.size(2, 3), "e": d.size(2, 3), "r": d.one(0, 1), "block": block}, o


def etc(d):
    b, h, t, n, p = d.size(1, 2), d.size(1, 2, empty=0.01), d.size(3, 6, 12), d.size(1, 2), d.one(0, 0, 5, 7)
    o = {"radius": d.one(0, 1, 2)}
    o |= {"clip": d.one(0, 1, 2)} if p else {}
    o |= {"long_labels": None, "global_labels": None} if p and d.chance(0.5) else {}
    o |= {"long_mask": True} if d.chance(0.3) else {}
    o |= {"global_mask": True} if d.chance(0.3) else {}
    o |= {"scale": d.one(0.5, 1.0)} if d.chance(0.3) else {}
    o |= {"lengths": d.lengths(b, t), "global_lengths": d.lengths(b, n)} if d.chance(0.3) else {}
    return {"b": b, "h": h, "t": t, "n": n, "d": d.size(2, 3), "e": d.size(2, 3), "p": p}, o


def synthesizer(d):
    b, h, k = d.size(1, 2), d.size(1, 2, empty=0.01), d.size(2, 4, 6, empty=0)
    parts = ("w_2", "w_a", "random", "random_1", "other_logits")
    o = {n: True for n in parts if d.chance(0.35)}
    o["causal"] = d.chance(0.4)
    q = k if o["causal"] else d.size(2, 3, empty=0)
    o |= {"mask": d.bools(*d.some((b, h, q, k)))} if d.chance(0.4) else {}
    sizes = {"b": b, "h": h, "q": q, "k": k, "m": d.one(2, 3), "f": d.one(2, 3), "e": d.size(2, 3)}
    return sizes, o


def recurrent(d, *arrays):
    """Sizes and options that the recurrences share."""
    b, t = d.size(1, 2), d.size(1, 3, 7, 12, 33)
    g = d.size(1, 2, 4, empty=0.01)
    h = g if d.chance(0.6) or not g else d.one(2 * g, max(1, g // 2) if g % 2 == 0 else g)
    o = {n: True for n in (*arrays, "decay", "channel_decay", "head_decay", "state", "reset") if d.chance(0.35)}
    o |= {"lengths": d.lengths(b, t)} if d.chance(0.3) else {}
    o |= {"scale": d.one(0.5, 1.0, -0.7)} if d.chance(0.3) else {}
    o |= {"head_map": "tile"} if d.chance(0.2) else {}
    o |= {"form": d.one(*FORMS), "chunk": d.one(1, 2, 5, 64), "strength": d.one(0.1, 1.0, 30.0)}
    return {"b": b, "h": h, "g": g, "t": t, "d": d.size(2, 3), "e": d.size(2, 3)}, o


def gated_linear(d):
    sizes, o = recurrent(d)
    if d.chance(0.4):
        o |= {"read": "before", **({"bonus": True} if d.chance(0.6) else {})}
    return sizes, o


def delta_rule(d):
    sizes, o = recurrent(d, "beta", "erase_key")
    o |= {"steps": d.one(2, 3)} if d.chance(0.2) else {}
    o |= {"qk_norm": d.one("l2", "l2_sum"), "norm_eps": d.one(1e-6, 0.1)} if d.chance(0.3) else {}
    return sizes, o


def rwkv7(d):
    return recurrent(d)


def ssd(d):
    b, g, t = d.size(1, 2), d.size(1, 2, empty=0.01), d.size(1, 3, 7, 12, 33)
    o = {n: True for n in ("skip", "dt_bias", "state") if d.chance(0.4)}
    o |= {"lengths": d.lengths(b, t)} if d.chance(0.3) else {}
    o |= {"dt_softplus": True} if d.chance(0.3) else {}
    o |= {"dt_limit": (0.013, d.one(0.87, 2.03))} if d.chance(0.3) else {}
    o |= {"form": d.one(*FORMS), "chunk": d.one(1, 2, 5, 64), "strength": d.one(0.1, 1.0, 30.0)}
    return {"b": b, "h": g * d.one(1, 2, 3), "g": g, "t": t, "d": d.size(2, 3), "e": d.size(2, 3)}, o


FORMS = ("parallel", "recurrent", "chunked")
DRAWS = {f"{f.__name__}_attention": f for f in (
    adaptive_span, bigbird, compressive, delta_rule, differential, efficient, etc, forgetting, gated_linear, linear, linformer,
    local, longformer, lsh, multi_head, nystrom, performer, routing, rwkv7, scaled_dot_product, sinkhorn, sparse_transformer,
    ssd, synthesizer, talking_heads, topk, transformer_xl,
)}  # fmt: skip
CHOOSING = ("lsh_attention", "routing_attention", "topk_attention")
GROWING = ("delta_rule_attention",)  # a write of a long key is more than what it replaces: the state overflows


def drawn(mechanism, seed):
    """The call of this mechanism and seed; None where the example refuses the sizes."""
    rng = np.random.default_rng([seed, zlib.crc32(mechanism.encode())])
    d = Draw(rng)
    sizes, options = DRAWS[mechanism](d)
    try:
        arguments = ra.mechanisms[mechanism].example(rng, **sizes, **options)
    except (ValueError, ZeroDivisionError, IndexError):
        return None
    if mechanism == "lsh_attention" and "buckets" in options:
        arguments.pop("rotations", None)
    plain = not {"position_bias", "absolute_q", "same_length"} & set(options) and arguments.get("r") is not None
    if mechanism == "transformer_xl_attention" and plain and options["causal"] and d.chance(0.3):
        (h, _, channels), q, k = arguments["r"].shape, sizes["q"], sizes["k"]
        places = np.sort(rng.permutation(k - q + 3)[: k - q])  # keys at places of their own
        arguments["key_places"] = np.concatenate([places, k - q + 3 + np.arange(q)])
        arguments["r"] = d.normal(h, k + 3, channels)
    arguments = {n: x for n, x in arguments.items() if x is not None}
    call = Call(mechanism, seed, arguments)
    call.dtype = d.one("float64", "float64", "float32", "float16")
    call.values = d.one("normal", "normal", "ties", "large" if mechanism not in CHOOSING + GROWING else "normal")
    for n in ("q", "k", "x_q"):
        if n in arguments and call.values == "large":
            call.amplitude = 3.0 if call.dtype == "float16" else 30.0  # sums of products may overflow float16
            arguments[n] = call.amplitude * arguments[n]
    if (
        call.values == "ties"
        and mechanism not in ("routing_attention", "nystrom_attention")
        and not {"rotations", "qk_norm"} & set(arguments)
    ):
        for n in ("q", "k", "v"):  # not what is normalised: the slope of the norm of zeros overflows float16
            if n in arguments:
                arguments[n] = np.round(arguments[n])
    call.algorithm = d.one("auto", "whole", "tiled")
    call.namespace = d.one("numpy", "numpy", "numpy", "strict")
    call.layout = d.one(0, 0, 1, 2, 3)
    return call
