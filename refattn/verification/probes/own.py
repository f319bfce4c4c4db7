"""What one mechanism alone has: shapes and features beside the shared ones, by the name of the mechanism.

A level holds words for the mechanism's ``example``: axis lengths by letter, options by name (True = draw the array).
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refattn.mechanism import Mechanism
from refattn.verification.probes.draft import Draft, Feature, Impossible, Level
from refattn.verification.probes.features import OFF, SHAPES, shared_features
from refattn.verification.probes.recurrences import RECURRENT_SHAPES, recurrent_features

__all__ = ["features_of"]


def _with(says: str = "", apply: Callable[[Draft], None] | None = None, **example: Any) -> Level:
    options = tuple(n for n, x in example.items() if len(n) > 1 and x is not None)
    return Level(example=example, options=options, apply=apply, says=says or _says(example))


def _says(example: Mapping[str, Any]) -> str:
    return ", ".join(n if x is True else f"{n}={x}" for n, x in example.items())


def _sizes(**sizes: int) -> Level:
    return Level(sizes=sizes, says=", ".join(f"{n}={x}" for n, x in sizes.items()))


def _switch(name: str, plain: str = "off", base: Level = OFF, **levels: Level) -> Feature:
    """A feature whose plain level is ``base``: what it passes, a candidate may lack; then the next level is the plain one."""
    return Feature(name, {plain: base, **levels})


def _passes(*options: str) -> Level:
    """What the example gives by itself."""
    return Level(options=options, says=f"with {', '.join(options)}")


def _drop(*names: str) -> Callable[[Draft], None]:
    """Leave out arguments that the example gives."""

    def apply(draft: Draft) -> None:
        for name in names:
            draft.arguments.pop(name, None)

    return apply


# Lengths that differ pairwise and meet no tile size; by letter, whatever of them the mechanism's example knows.
GENERAL = {
    "plain": _sizes(b=2, h=3, g=3, q=19, k=33, t=33, d=10, e=7, m=11, x=4, y=5),
    "mixed": _sizes(b=1, h=5, g=5, q=37, k=11, t=40, d=6, e=9, m=13, x=2, y=3),
    "equal": _sizes(b=3, h=2, g=2, q=24, k=24, t=24, d=8, e=8, m=8, x=2, y=2),
    "single": _sizes(b=3, h=2, g=2, q=1, k=17, t=1, d=5, e=3, m=7, x=3, y=2),
    "long": _sizes(b=1, h=2, g=2, q=129, k=129, t=129, d=6, e=6, m=8, x=2, y=2),
}

_CAUSAL_SQUARE = _switch("causal", "none", on=_with("causal", causal=True))


def _lengths(*share: float) -> Callable[[Draft], None]:
    def apply(draft: Draft) -> None:
        draft.give(key_lengths=np.resize([int(draft.k * s) for s in share], draft.b).astype(np.int32))

    return apply


_KEY_LENGTHS = _switch(
    "lengths",
    "none",
    keys=Level(options=("key_lengths",), apply=_lengths(1.0, 0.4, 0.7), says="padded keys"),
    one_empty=Level(options=("key_lengths",), apply=_lengths(0.6, 0.0, 1.0), says="a batch entry without keys"),
)


def _buckets(draft: Draft) -> None:
    """Drawn buckets in place of rotations: they say where a token goes, and nothing need be hashed."""
    given = draft.arguments
    rotations = given.pop("rotations")
    n_buckets = given["n_buckets"]
    count = int(np.prod(n_buckets)) if isinstance(n_buckets, tuple) else int(n_buckets)
    shape = (*given["qk"].shape[:2], rotations.shape[-2], given["qk"].shape[-2])
    draft.give(buckets=draft.rng("buckets").integers(0, count, shape))


def _padding(draft: Draft) -> None:
    shares = np.resize([1.0, 0.6, 0.8], draft.b)
    draft.give(mask=np.arange(draft.q) < np.rint(draft.q * shares)[:, None])


def _global_tokens(count: tuple[int, ...]) -> Callable[[Draft], None]:
    """Another number of global tokens in each batch entry."""

    def apply(draft: Draft) -> None:
        order = draft.rng("global tokens").random((draft.b, draft.q)).argsort(-1)
        draft.give(global_tokens=order < np.resize(np.array(count), draft.b)[:, None])

    return apply


def _absent_first(draft: Draft) -> None:
    """Chosen keys whose first places are empty, in every row; some rows have none at all."""
    rng = draft.rng("indices")
    k, n = draft.k, min(12, draft.k)
    chosen = np.stack([rng.permutation(k)[:n] for _ in range(draft.b * draft.h * draft.q)])
    chosen = chosen.reshape(draft.b, draft.h, draft.q, n)
    chosen[..., : (2 * n) // 3] = -1
    chosen[:, :, -1] = -1
    draft.arguments.pop("count", None)
    draft.give(indices=chosen)


def _lists(whose: str, block: int | None = None, **more: Any) -> Callable[[Draft], None]:
    """Lists of keys, or of blocks, for one, the key or the query heads: in no order, some absent, one standing twice."""

    def apply(draft: Draft) -> None:
        given, rng = draft.arguments, draft.rng("lists")
        of_keys = given["k"].shape[-3] if "k" in given else given["w_k"].shape[1]
        heads = {"one": 1, "key": of_keys, "query": draft.h}[whose]
        count = draft.k if block is None else -(-draft.k // block)
        rows = np.stack([rng.permutation(count) for _ in range(draft.b * heads * draft.q)])
        chosen = rows.reshape(draft.b, heads, draft.q, count)[..., : max(2, (count + 1) // 2)]
        chosen = np.where(rng.random(chosen.shape) < 0.2, -1, chosen)
        chosen[..., -1] = chosen[..., 0]
        name = "indices" if block is None else "block_indices"
        draft.give(**{name: chosen}, **({} if block is None else {"block": block}), **more)

    return apply


_LISTS = _switch(
    "lists",
    "none",
    one=Level(options=("indices",), apply=_lists("one"), says="keys listed for all heads"),
    key_heads=Level(
        options=("indices",), apply=_lists("key"), form="lists_of_key_heads", says="keys listed for each key head"
    ),
    heads=Level(
        options=("indices",), apply=_lists("query"), form="lists_of_heads", says="keys listed for each query head"
    ),
    blocks=Level(options=("block_indices", "block"), apply=_lists("query", block=5), says="blocks of 5 keys listed"),
    counted=Level(
        options=("indices", "duplicates"),
        apply=_lists("query", duplicates="multiset"),
        says="a key that is listed twice counts twice",
    ),
)


def _exact_ties(draft: Draft) -> None:
    """Whole numbers times a power of two: equal logits are equal in every order of summation."""
    if "scale" in draft.arguments:
        raise Impossible("with a scale of one's own the logits are rounded, and ties with them")


def _span_alone(draft: Draft) -> None:
    """Span and ramp, and neither positions nor a largest span: every key in reach stands before the ramp's end."""
    given = draft.arguments
    given.pop("key_positions", None)
    given.pop("max_span", None)
    reach = max(1.0, draft.k - draft.q - float(given["ramp"]))
    given["span"] = reach * draft.rng("span").uniform(0.2, 1.0, draft.h)


_DYNAMIC = ("query_logits", "key_logits", "query_weights", "key_weights")

_OWN: dict[str, tuple[Feature, ...]] = {
    "scaled_dot_product_attention": (_LISTS,),
    "multi_head_attention": (
        _LISTS,
        _switch(
            "arrays",
            "three",
            self_attention=_with("one array in all three roles", apply=_drop("x_k", "x_v"), x_k=None, x_v=None),
            memory=_with("keys and values of the same tokens", apply=_drop("x_v"), x_v=None),
        ),
        _switch(
            "extra",
            "none",
            key=_with("an extra key", extra_key=True, extra_value=True),
            zero=_with("a key of zeros", zero_attention=True),
            both=_with("an extra key and one of zeros", extra_key=True, extra_value=True, zero_attention=True),
        ),
        _switch(
            "biases",
            "none",
            Level(apply=_drop("b_q", "b_k", "b_v", "b_o"), says="no biases of the projections"),
            all=_passes("b_q", "b_k", "b_v", "b_o"),
            **{
                n: Level(options=(n,), apply=_drop(*{"b_q", "b_k", "b_v", "b_o"} - {n}), says=f"{n} alone")
                for n in ("b_q", "b_k", "b_v", "b_o")
            },
        ),
    ),
    "talking_heads_attention": (
        _switch(
            "projections",
            "both",
            _passes("logits_projection", "weights_projection"),
            logits=Level(
                example={"x": 5, "y": 3, "h": 3, "weights_projection": None},
                options=("logits_projection",),
                says="only the logits are projected",
            ),
            weights=Level(
                example={"x": 3, "y": 5, "h": 3, "logits_projection": None},
                options=("weights_projection",),
                says="only the weights are projected",
            ),
        ),
        _switch(
            "dynamic",
            "none",
            all=_with("all dynamic parts", None, **dict.fromkeys(_DYNAMIC, True)),
            **{n: _with(f"{n} alone", None, **{n: True}) for n in _DYNAMIC},
        ),
        _switch("heads", "three counts", equal=_with("equal head counts", x=3, y=3, h=3)),
    ),
    "topk_attention": (
        _switch(
            "chosen",
            "count 3",
            _passes("count"),
            one=_with("one key for each query", count=1),
            many=_with("eight keys", count=8),
            ties=_with("every key stands several times: ties go to the lower index", _exact_ties, n=5, count=8, d=4),
            indices=Level(options=("indices",), apply=_absent_first, says="keys given, the first of them absent"),
        ),
    ),
    "local_attention": (
        _switch(
            "blocks",
            "one back",
            wide=_with("two blocks back, one ahead", block=4, look_backward=2, look_forward=1),
            ahead=_with("one block ahead alone", block=5, look_backward=0, look_forward=1),
            large=_with("a block longer than the sequence", block=256),
            own=_with("its own block alone", look_backward=0),
        ),
        _switch("exact", "blocks", on=_with("distances, not blocks", exact=True)),
    ),
    "sparse_transformer_attention": (
        _switch(
            "parts",
            "split",
            merged=_with(heads="merged"),
            first=_with(heads="first"),
            second=_with(heads="second"),
            interleaved=_with(heads="interleaved", layer=1),
        ),
        _switch(
            "form",
            "strided",
            fixed=_with("fixed pattern", pattern="fixed", summary=2, stride=6),
            code=_with("the released code's run", variant="code"),
        ),
    ),
    "adaptive_span_attention": (
        _switch(
            "spans",
            "drawn",
            _passes("key_positions"),
            alone=Level(apply=_span_alone, says="span and ramp alone"),
            whole=_with("spans of whole tokens", h=3, span=np.array([4.0, 0.0, 7.0]), ramp=3.0, max_span=12),
            zero=_with("spans of zero", h=3, span=np.zeros(3), ramp=4.0),
        ),
        _switch("persistent", "none", on=_with("persistent slots", n=2)),
        _switch("origin", "one", zero=_with("the released origin", distance_origin=0)),
        _switch("renormalize", "none", on=_with("the released normaliser", renormalize_eps=1e-3)),
    ),
    "transformer_xl_attention": (
        _switch("direction", "causal", both=_with("both directions", causal=False)),
        _switch("same_length", "off", on=_with(same_length=True)),
        _switch(
            "table",
            "r u w",
            _passes("u", "w"),
            scalar=_with("a learned scalar by distance", position_bias=True),
            absolute=_with("absolute positions", absolute_q=True),
            no_u=Level(options=("w",), apply=_drop("u"), says="without u"),
            no_w=Level(options=("u",), apply=_drop("w"), says="without w"),
            r=Level(apply=_drop("u", "w"), says="neither u nor w"),
        ),
    ),
    "compressive_attention": (
        _switch(
            "positions",
            "slot",
            end=_with(compressed_positions="span_end", rate=3),
            mid=_with(compressed_positions="span_mid", rate=4),
        ),
        _switch("projection", "with", _passes("w_o"), without=Level(apply=_drop("w_o"), says="no output projection")),
    ),
    "lsh_attention": (
        _switch(
            "hashed",
            "rotations",
            _passes("rotations"),
            buckets=Level(options=("buckets",), apply=_buckets, says="buckets handed over"),
        ),
        _switch("rounds", "two", one=_with("one round", hashes=1), four=_with("four rounds", hashes=4)),
        _CAUSAL_SQUARE,
        _switch("within_bucket", "on", off=_with("all keys of the window", within_bucket=False)),
        _switch("duplicates", "once", multiset=_with("pairs that meet twice count twice", duplicates="multiset")),
        _switch(
            "self_attention", "last resort", always=_with(self_attention="always"), never=_with(self_attention="never")
        ),
        _switch("key_norm", "l2", rms=_with(key_norm="rms")),
        _switch("wrap", "no", on=_with(wrap="global")),
        _switch("chunks", "one before", wide=_with("two chunks before, one after", before=2, after=1)),
        _switch("padding", "none", on=Level(options=("mask",), apply=_padding, says="padding is hidden")),
    ),
    "routing_attention": (
        _switch("keys", "shared", own=_with("keys of their own", k=True)),
        _switch("membership", "chosen", given=_with("members given", members=True)),
        _CAUSAL_SQUARE,
        _switch("causal_by", "position", rank=_with("causal by place in the cluster", causal=True, causal_by="rank")),
        _switch(
            "cluster_size",
            "all",
            small=_with("tokens in no cluster", cluster_size=4),
            large=_with("tokens in several clusters", cluster_size=9),
        ),
        _switch(
            "self_attention", "always", last=_with(self_attention="last_resort"), never=_with(self_attention="never")
        ),
        _switch("memory", "none", on=_with("a memory of every cluster", memory_keys=True)),
        _switch("relative", "none", keys=_with(relative_keys=True), values=_with(relative_values=True)),
    ),
    "causal_convolution": (
        _switch("state", "on", _passes("state"), none=Level(apply=_drop("state"), says="no state")),
        _switch("activation", "none", silu=_with("silu afterwards", activation="silu")),
        _switch("taps", "four", one=_with("one tap", w=1), two=_with("two taps", w=2)),
        _switch("tokens", "many", two=_with("fewer tokens than taps", t=2)),
    ),
    "log_decay": (
        _switch(
            "form",
            "softplus",
            bounded=_with("the bounded gate", form="bounded", lower_bound=-5.0),
            logsigmoid=_with("a log sigmoid with a temperature", form="logsigmoid", temperature=16.0),
            exp=_with("an exponential", form="exp"),
        ),
    ),
    "linear_attention": (
        _CAUSAL_SQUARE,
        _switch("feature_map", "elu", identity=_with("the identity as feature map", feature_map="identity")),
        _switch(
            "normalize",
            "on",
            off=_with("not normalised", normalize=False),
            eps=_with("a constant in the divisor", normalize_eps=0.5),
        ),
        _switch(
            "state",
            "none",
            both=_with("a state to start from", state=True, normalizer=True),
            alone=_with("a state alone", state=True, normalize=False),
        ),
        _KEY_LENGTHS,
        _switch("form", "auto", recurrent=_with(form="recurrent"), chunked=_with(form="chunked", chunk=16)),
    ),
    "performer_attention": (
        _CAUSAL_SQUARE,
        _switch("kernel", "softmax", relu=_with("rectified features", kernel="relu")),
        _switch("eps", "default", large=_with("a large constant in the features", eps=0.2)),
        _switch("key_sum_eps", "none", on=_with("a constant in the key sum", key_sum_eps=0.5)),
    ),
    "efficient_attention": (_KEY_LENGTHS,),
    "longformer_attention": (
        _switch(
            "tokens",
            "two",
            _passes("global_tokens", "q_global", "k_global", "v_global"),
            unequal=Level(
                options=("global_tokens", "q_global", "k_global", "v_global"),
                apply=_global_tokens((3, 1, 2)),
                says="unequal numbers of global tokens",
            ),
            local=Level(
                example={"q_global": None, "k_global": None, "v_global": None},
                options=("global_tokens",),
                says="global tokens by the local arrays",
            ),
            none=_with("no global tokens", n=0),
        ),
        _switch(
            "reach",
            "even",
            uneven=_with("an uneven window", window=(4, 2)),
            long=_with("a window longer than the sequence", window=(60, 60)),
            zero=_with("a window of the token itself", window=(0, 0)),
        ),
    ),
    "bigbird_attention": (
        _switch(
            "random",
            "two",
            _passes("random_blocks"),
            none=_with("no random blocks", r=0),
            three=_with("three random blocks", r=3),
        ),
        _switch(
            "global_blocks",
            "both",
            first=_with(global_blocks=(1, 0)),
            none=_with(global_blocks=(0, 0)),
            two=_with(global_blocks=(2, 1)),
        ),
        _switch("block", "small", wide=_with(block=5, window_blocks=2)),
    ),
    "etc_attention": (
        _switch("labels", "on", _passes("labels"), none=_with("no labels", p=0)),
        _switch("masks", "none", on=_with("masks of the pieces", long_mask=True, global_mask=True)),
        _switch("radius_", "small", long=_with("a radius beyond the sequence", radius=60)),
    ),
    "sinkhorn_attention": (
        _CAUSAL_SQUARE,
        _switch("noise", "drawn", _passes("noise"), none=_with("no noise", noise=None)),
        _switch("iterations", "four", one=_with(iterations=1), none=_with(iterations=0)),
    ),
    "synthesizer_attention": (
        _switch(
            "parts",
            "dense",
            _passes("w_2"),
            factors=_with("two factors", p=3, w_a=True),
            table=_with("a table", random=True),
            low=_with("a table of rank 2", random_1=True),
            mixture=_with("all parts mixed", w_2=True, w_a=True, random=True, random_1=True, other_logits=True),
        ),
        _CAUSAL_SQUARE,
    ),
    "nystrom_attention": (
        _switch("landmarks", "three", one=_with(landmarks=1), six=_with("landmarks that divide nothing", landmarks=6)),
        _switch("iterations", "six", two=_with("far from converged", iterations=2)),
        _switch("start", "matrix", batch=_with("one starting scale for the batch", pinv_scale="batch", iterations=2)),
    ),
    "linformer_attention": (_switch("rows", "four", many=_with("13 rows", n=13), one=_with("one row", n=1)),),
}


def features_of(mechanism: Mechanism) -> dict[str, Feature]:
    """Every feature of a mechanism by name, ``shape`` first; the mechanism's own take the place of shared ones."""
    scores = "mask" in mechanism.options and ("causal" in mechanism.options or "align" in mechanism.options)
    recurrent = recurrent_features(mechanism.name)
    own = {f.name: f for f in (*_OWN.get(mechanism.name, ()), *recurrent)}
    shapes = (
        SHAPES
        if scores and mechanism.name not in ("lsh_attention", "transformer_xl_attention", "synthesizer_attention")
        else GENERAL
    )
    shapes = RECURRENT_SHAPES if recurrent else shapes
    found = {"shape": Feature("shape", _distinct(mechanism, shapes))}
    found |= {n: f for n, f in shared_features(mechanism).items() if n not in own}
    found |= own
    if mechanism.name not in _OWN and not recurrent:
        for name, parameter in inspect.signature(mechanism).parameters.items():
            if isinstance(parameter.default, bool) and name not in ("keep_weights", *found):
                flipped = {name: not parameter.default}
                found[name] = _switch(
                    name, str(parameter.default), **{str(not parameter.default): _with("", None, **flipped)}
                )
    listed = {"none": OFF}
    for index, entry in enumerate(getattr(mechanism, "probe_options", ())):
        words = {n: x for n, x in entry.items() if n != "says"}
        listed[str(index)] = _with(str(entry.get("says", "")), **words)
    if len(listed) > 1:
        found["listed"] = Feature("listed", listed)
    return found


def _distinct(mechanism: Mechanism, shapes: Mapping[str, Level]) -> dict[str, Level]:
    """Shapes that differ in the letters that the mechanism's example knows."""
    from refattn.verification.probes.draft import sizes_of

    kept: dict[str, Level] = {}
    seen = []
    for name, level in shapes.items():
        sizes = sizes_of(mechanism, level.sizes)
        if sizes not in seen:
            seen.append(sizes)
            kept[name] = level
    return kept
