"""Serving forms in steps: one plain call of a mechanism's definition for each sequence, or for the whole.

    key s of sequence n = row cu_seqlens_k[n] + s                                               packed
                        = slot s mod page of page block_table[n, s // page]                     paged

Axes: ``t`` and ``s`` rows of queries and keys of all sequences, others as in the mechanism, whose batch axes are left out.
"""

import itertools

import numpy as np

from refattn.definitions.steps import Definition, constant, step

__all__ = ["Packed", "Paged", "Ring", "Sequences", "Split", "form_of"]

QUERY, KEY = "q", "k"

SOFTMAX = {
    "q": "hqd", "k": "gkd", "v": "gke", "query_segments": "q", "key_segments": "k", "query_lengths": "b", "key_lengths": "b",
    "align": "b", "indices": "nqc", "block_indices": "nqc",
}  # fmt: skip
TOKENS = {
    "q": "hqd", "k": "gqd", "v": "gqe", "decay": "gq", "channel_decay": "gqd", "beta": "gq", "erase_key": "gqd", "remove": "gqd",
    "replace": "gqd", "reset": "q", "state": "b", "lengths": "b",
}  # fmt: skip
AXES = {
    "multi_head_attention": SOFTMAX | {"x_q": "qm", "x_k": "km", "x_v": "km"},
    "mla_attention": SOFTMAX | {"q_nope": "hqd", "q_rope": "hqr", "latent": "kl", "k_rope": "kr"},
    "deepseek_sparse_attention": SOFTMAX | {"q_index": "nqi", "k_index": "ki", "w_index": "nq"},
    "native_sparse_attention": SOFTMAX | {"gates": "3hq", "k_window": "gkd", "v_window": "gke"},
    "compressed_sparse_attention": SOFTMAX | {"kv": "kd"},
    "forgetting_attention": SOFTMAX | {"log_forget": "hk"},
    "differential_attention": SOFTMAX | {"lam": "hq"},
    "linear_attention": SOFTMAX | {"state": "b", "normalizer": "b"},
    "gated_linear_attention": TOKENS, "delta_rule_attention": TOKENS, "rwkv7_attention": TOKENS,
    "ssd_attention": {"x": "hqe", "dt": "hq", "b": "gqd", "c": "gqd", "state": "b", "lengths": "b"},
}  # fmt: skip
RESULTS = {
    "output": "hqe", "lse": "hq", "lses": "2hq", "remainder": "hq", "indices": "nqc", "block_indices": "nqc", "state": "b",
    "normalizer": "b",
}  # fmt: skip
"""Axes in the plain call; "b": one entry per sequence."""
PADDING = {"lse": -np.inf, "lses": -np.inf, "indices": -1, "block_indices": -1}
LENGTH_LAST = ("lse", "lses")


def length_first(axes: str) -> int:
    """Where an array of the form has its length: first, behind a counted axis."""
    return 1 if axes[0].isdigit() else 0


class Sequences(Definition):
    """What packed and paged share: rows of each sequence, one inner call on them, and the way back."""

    mechanism = constant("scaled_dot_product_attention")
    defaults = {
        "cu_seqlens_q": None, "cu_seqlens_k": None, "kv_layout": "NHD", "pattern": None, "score_mod": None, "align": None, "steps": 1,
    }  # fmt: skip
    own = constant(("cu_seqlens_q", "cu_seqlens_k", "block_table", "seq_lens", "kv_layout"))
    gradients = ()

    @step
    def axes(self):
        """Axes of the arguments that were passed, where they have a length or an entry per sequence."""
        table = AXES.get(self.mechanism, SOFTMAX)
        return {
            n: table[n]
            for n, x in self.arguments.items()
            if n in table and (table[n] != "b" or np.ndim(x)) and np.ndim(x)
        }

    @step
    def flat(self):
        """The arrays with a length, (rows, ...) or (counted, rows, ...)."""
        return {n: self.arguments[n] for n in self.axes if self.axes[n] != "b"}

    @step
    def total_queries(self):
        """Rows of queries, padding included."""
        name = next(n for n in self.flat if QUERY in self.axes[n])
        return self.flat[name].shape[length_first(self.axes[name])] // self.rows_of_token(name)

    @step
    def query_ends(self):
        """(b+1,)"""
        return np.asarray(self.cu_seqlens_q)

    @step
    def sequences(self):
        return len(self.query_ends) - 1

    @step
    def query_rows(self):
        """Rows of the queries of each sequence."""
        return [np.arange(self.query_ends[n], self.query_ends[n + 1]) for n in range(self.sequences)]

    @step
    def key_rows(self):
        """Rows of the keys of each sequence, in order."""
        raise NotImplementedError

    @step
    def value_rows(self):
        """Rows of the values of each sequence."""
        return self.key_rows

    @step
    def offsets(self):
        """Where query 0 of each sequence stands among its keys: the last query at the last key, unless ``align`` says otherwise."""
        given = [self.align] * self.sequences if not np.ndim(self.align) else np.asarray(self.align).tolist()
        return ["lower_right" if x is None else x for x in given]

    def rows_of_token(self, name):
        """Rows of an array for each token."""
        return int(self.steps) if name in ("k", "v", "beta", "erase_key") and AXES.get(self.mechanism) == TOKENS else 1

    def rows_for(self, name, n):
        """Rows of one array that belong to sequence n."""
        if QUERY in self.axes[name]:
            rows = self.query_rows[n]
        else:
            rows = self.value_rows[n] if name == "v" else self.key_rows[n]
        times = self.rows_of_token(name)
        return (rows[:, None] * times + np.arange(times)).reshape(-1)

    def own_call(self, n):
        """The arguments of the plain call of sequence n; one behind the last sequence has nothing."""
        there = n < self.sequences
        found = {}
        for name, x in self.arguments.items():
            axes = self.axes.get(name)
            if name in self.own:
                continue
            if axes is None:
                found[name] = x
            elif axes == "b":
                one = np.asarray(x)[n] if there else np.zeros(np.shape(x)[1:])
                found[name] = one if np.ndim(one) else int(one)
            else:
                rows = self.rows_for(name, n) if there else np.zeros(0, int)
                taken = np.take(self.flat[name], rows, axis=length_first(axes))
                found[name] = np.moveaxis(taken, length_first(axes), next(i for i, c in enumerate(axes) if c in "qk"))
        if isinstance(self.pattern, (list, tuple)):
            found["pattern"] = self.pattern[n] if there else None
        if self.score_mod is not None:
            found["score_mod"] = lambda logits, b, h, i, j: self.score_mod(logits, b + n, h, i, j)
            if hasattr(self.score_mod, "derivative"):
                found["score_mod"].derivative = lambda logits, b, h, i, j: self.score_mod.derivative(
                    logits, b + n, h, i, j
                )
        if "align" in self.inner.defaults:
            found["align"] = self.offsets[n] if there else "lower_right"
        return found

    @step
    def calls(self):
        """The plain calls of all sequences (of none: one on nothing, which tells shapes)."""
        return [self.inner(self.own_call(n), storage=self.storage) for n in range(max(1, self.sequences))]

    # ------------------------------------------------------------------ results

    def result_fields(self):
        return {n: n for n in self.calls[0].result_fields() if n in RESULTS}

    def of_calls(self, name):
        """A result of all sequences in its place; what stands in no sequence is padding."""
        parts = [c.result()[name] for c in self.calls]
        axes = "qm" if self.mechanism == "multi_head_attention" and name == "output" else RESULTS[name]
        if axes == "b":
            return np.stack(parts)[: self.sequences]
        place = next(i for i, c in enumerate(axes) if c == QUERY)
        if name.endswith("indices"):
            width = max(p.shape[-1] for p in parts)
            parts = [np.concatenate([p, np.full((*p.shape[:-1], width - p.shape[-1]), -1)], -1) for p in parts]
        shape = [*parts[0].shape]
        shape[place] = self.total_queries
        whole = np.full(shape, PADDING.get(name, 0), dtype=parts[0].dtype)
        for rows, part in zip(self.query_rows, parts, strict=False):
            np.moveaxis(whole, place, 0)[rows] = np.moveaxis(part, place, 0)
        return whole if name in LENGTH_LAST else np.moveaxis(whole, place, length_first(axes))

    @step
    def output(self):
        return self.of_calls("output")

    @step
    def lse(self):
        return self.of_calls("lse")

    @step
    def lses(self):
        return self.of_calls("lses")

    @step
    def remainder(self):
        return self.of_calls("remainder")

    @step
    def indices(self):
        return self.of_calls("indices")

    @step
    def block_indices(self):
        return self.of_calls("block_indices")

    @step
    def state(self):
        return self.of_calls("state")

    @step
    def normalizer(self):
        return self.of_calls("normalizer")

    # ------------------------------------------------------------------ gradients

    def own_cotangents(self, n):
        """Cotangents of the results of sequence n, as the plain call has them."""
        found = {}
        for name in self.cotangents or ("output",):
            d = self.cotangent(name)
            axes = "qm" if self.mechanism == "multi_head_attention" and name == "output" else RESULTS[name]
            if axes == "b":
                found[name] = d[n] if n < self.sequences else np.zeros(d.shape[1:])
                continue
            rows = self.query_rows[n] if n < self.sequences else np.zeros(0, int)
            place = next(i for i, c in enumerate(axes) if c == QUERY)
            at = place if name in LENGTH_LAST else length_first(axes)
            found[name] = np.moveaxis(np.take(d, rows, axis=at), at, place)
        return found

    @step
    def pulled(self):
        """Gradients of the plain calls."""
        names = [n for n in self.inner.gradients if n in self.arguments]
        return [c.pull(**self.own_cotangents(n)).gradient(names) for n, c in enumerate(self.calls)]

    def gradient(self, names=None):
        """Each row gets what its sequence says of it; a row in several sequences gets their sum."""
        asked = self.inner.gradients if names is None else names
        return {n: self.gradient_of(n) for n in asked if n in self.arguments}

    def gradient_of(self, name):
        parts = [g[name] for g in self.pulled]
        axes = self.axes.get(name)
        if axes is None:
            return sum(parts)
        if axes == "b":
            return np.stack(parts)[: self.sequences]
        whole = np.zeros(self.flat[name].shape)
        place = next(i for i, c in enumerate(axes) if c in "qk")
        for n in range(self.sequences):
            np.add.at(
                np.moveaxis(whole, length_first(axes), 0), self.rows_for(name, n), np.moveaxis(parts[n], place, 0)
            )
        return self.as_passed(name, whole)

    def as_passed(self, name, whole):
        """The gradient of the flat array in the shape of the argument."""
        return whole


class Packed(Sequences):
    """Sequences one behind the other."""

    @step
    def key_ends(self):
        """(b+1,)"""
        return self.query_ends if self.cu_seqlens_k is None else np.asarray(self.cu_seqlens_k)

    @step
    def key_rows(self):
        return [np.arange(self.key_ends[n], self.key_ends[n + 1]) for n in range(self.sequences)]


class Paged(Sequences):
    """Keys in pages: the row of key s of sequence n is block_table[n, s // page] page + s mod page."""

    @step
    def page(self):
        """Slots of a page."""
        name = next(n for n in self.axes if KEY in self.axes[n])
        return self.arguments[name].shape[self.slot_axis(name)]

    def slot_axis(self, name):
        """The axis of slots: 1, or 2 behind the heads."""
        return 2 if self.kv_layout == "HND" and self.axes[name][0] in "gh" else 1

    @step
    def flat(self):
        found = {n: self.arguments[n] for n in self.axes if self.axes[n] != "b"}
        for name, x in found.items():
            if KEY in self.axes[name]:
                pages = np.moveaxis(x, self.slot_axis(name), 1)
                found[name] = pages.reshape(-1, *pages.shape[2:])
        return found

    @step
    def query_ends(self):
        return np.arange(len(self.key_lengths) + 1) if self.cu_seqlens_q is None else np.asarray(self.cu_seqlens_q)

    @step
    def key_lengths(self):
        """(b,)"""
        return np.asarray(self.seq_lens)

    @step
    def table(self):
        """(b, p)"""
        return np.asarray(self.block_table)

    @step
    def key_rows(self):
        found = []
        for n in range(self.sequences):
            s = np.arange(self.key_lengths[n])
            found.append(self.table[n, s // self.page] * self.page + s % self.page)
        return found

    def as_passed(self, name, whole):
        if KEY not in self.axes[name]:
            return whole
        pages = whole.reshape(-1, self.page, *whole.shape[1:])
        return np.moveaxis(pages, 1, self.slot_axis(name))


class Parts(Definition):
    """Keys in parts are all keys: the plain call, whatever the parts."""

    defaults = {"splits": None, "ranks": None, "deal": "contiguous", "executor": None, "sinks": None, "mask": None}
    mechanism = constant("scaled_dot_product_attention")

    def plain(self, **changed):
        own = ("splits", "ranks", "deal", "executor")
        given = {n: x for n, x in self.arguments.items() if n not in own}
        return self.inner({**given, **changed}, storage=self.storage)

    @step
    def attention(self):
        return self.plain()

    @step
    def output(self):
        return self.attention.output

    @step
    def lse(self):
        return self.attention.lse

    def result_fields(self):
        return {"output": "output", "lse": "lse"}

    def gradient(self, names=None):
        asked = [n for n in (self.inner.gradients if names is None else names) if n in self.arguments]
        cotangents = {n: x for n, x in self.cotangents.items() if n in ("output", "lse")}
        total = self.attention.pull(**cotangents).gradient(asked)
        for n in range(len(self.parts)):
            own = {f: self.cotangents[f"part_{f}s"][n] for f in ("output", "lse") if f"part_{f}s" in self.cotangents}
            if own:
                total = {a: total[a] + g for a, g in self.parts[n].pull(**own).gradient(asked).items()} | (
                    {"sinks": total["sinks"]} if "sinks" in total else {}
                )
        return total

    parts = constant(())


class Ring(Parts):
    """Attention over ranks."""


class Split(Parts):
    """Attention with keys in parts, and every part by itself: the others are masked."""

    def result_fields(self):
        return {"output": "output", "lse": "lse", "part_outputs": "part_outputs", "part_lses": "part_lses"}

    @step
    def keys(self):
        name = "k" if "k" in self.arguments else "latent"
        return self.arguments[name].shape[-2]

    @step
    def members(self):
        """Which keys are in each part, bools (k,)"""
        j = np.arange(self.keys)
        if np.ndim(self.splits):
            ends = [0, *self.splits, self.keys]
        else:
            size, more = divmod(self.keys, self.splits)
            ends = np.cumsum([0, *(size + (n < more) for n in range(self.splits))]).tolist()
        return [(j >= a) & (j < b) for a, b in itertools.pairwise(ends)]

    @step
    def parts(self):
        seen = [own if self.mask is None else own & self.mask for own in self.members]
        return [self.plain(mask=mask, sinks=None) for mask in seen]

    @step
    def part_outputs(self):
        return np.stack([p.output for p in self.parts])

    @step
    def part_lses(self):
        return np.stack([p.lse for p in self.parts])


FORMS = {"packed": Packed, "paged": Paged, "split": Split, "ring": Ring}


def form_of(form, mechanism, inner):
    """The definition of a form of the mechanism whose definition is ``inner``."""
    base = FORMS[form]
    body = {"inner": constant(inner), "mechanism": constant(mechanism), "__doc__": base.__doc__}
    return type(f"{base.__name__}{inner.__name__}", (base,), body)


class UpdateCache(Definition):
    """Row r of sequence n is written at write_indices[n] + r, modulo the slots where the mode is circular."""

    gradients = ("cache", "update")
    defaults = {"mode": "linear", "axis": -2}

    @step
    def slots(self):
        """(b, t): where each row goes."""
        count = self.cache.shape[self.axis]
        rows = np.arange(self.update.shape[self.axis])
        places = np.asarray(self.write_indices)[:, None] + rows
        return places % count if self.mode == "circular" else places

    @step
    def output(self):
        found = np.moveaxis(self.cache, self.axis, 1).copy()
        rows = np.moveaxis(self.update, self.axis, 1)
        for n, places in enumerate(self.slots):
            found[n, places] = rows[n]
        return np.moveaxis(found, 1, self.axis)

    @step
    def d_cache(self):
        d = np.moveaxis(self.cotangent("output"), self.axis, 1).copy()
        for n, places in enumerate(self.slots):
            d[n, places] = 0
        return np.moveaxis(d, 1, self.axis)

    @step
    def d_update(self):
        d = np.moveaxis(self.cotangent("output"), self.axis, 1)
        rows = np.zeros(np.moveaxis(self.update, self.axis, 1).shape)
        for n, places in enumerate(self.slots):
            rows[n] = d[n, places]
        return np.moveaxis(rows, 1, self.axis)


def update_cache_example(rng, *, b=2, s=6, t=2, d=3, **options):
    """A cache (b,s,d) and new rows (b,t,d)."""
    starts = rng.integers(0, max(1, s - t + 1), b)
    return {
        "cache": rng.standard_normal((b, s, d)),
        "update": rng.standard_normal((b, t, d)),
        "write_indices": starts,
        **options,
    }
