"""Calls that are left out because of a fault that is known and open; the lists only shrink.

Whoever mends a fault takes its line out here.
"""

import numpy as np


def is_open(call):
    return any(applies(call.mechanism.removesuffix("_attention"), call.arguments, call) for applies in OPEN.values())


def batch(a):
    return next(np.shape(x)[0] for x in a.values() if isinstance(x, np.ndarray) and x.ndim > 2)


def heads(a):
    return next(np.shape(x)[-3] for x in a.values() if isinstance(x, np.ndarray) and x.ndim == 4)


def empty_heads(a):
    return any(isinstance(x, np.ndarray) and x.ndim == 4 and x.shape[-3] == 0 for x in a.values())


OPEN = {
    # the definition's d_lse of keys is 0 where sinks outweigh them by far
    "sinks outside the lse": lambda m, a, c: a.get("lse_includes_sinks") is False and c.amplitude > 1,
    # 0 heads: the definition's sinks, summary_offsets=[]; buckets of no batch or no head
    "no head": lambda m, a, c: empty_heads(a) and bool({"sinks", "summary_offsets", "buckets"} & set(a)),
    # an unnormalised causal sum of no value channels
    "linear, e = 0": lambda m, a, c: m == "linear" and a["v"].shape[-1] == 0,
    # the maximum runs over keys beyond the span too: lse -inf and a wrong gradient of what is left
    "adaptive span, large logits": lambda m, a, c: m == "adaptive_span" and c.amplitude > 1 and "renormalize_eps" in a,
}

# Arguments (d_...: cotangents) of malformed calls that are accepted, or refused by a message that does not name them.
ERRORS = {
    "adaptive_span": "keep_weights key_positions ramp renormalize_eps span",
    "compressive": "compressed memory r same_length through_memory u w x",
    "linear": "causal normalize normalize_eps",
    "local": "k keep_weights q",
    "performer": "causal eps key_sum_eps",
    "routing": "average_eps causal cluster_size relative_keys relative_values",
    "sinkhorn": "noise",
    "sparse_transformer": "align head_map k keep_weights q v",
    "synthesizer": "causal mixture",
    "topk": "k keep_weights q",
    "transformer_xl": "causal k key_places position_bias q r same_length u v w",
}
