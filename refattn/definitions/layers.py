"""What stands between attentions, in steps: linear maps, layer norm, feed-forward, and the attention layers of three papers.

    layer_norm    normal = (x - mean) / sqrt(var + eps)        output = normal weight + bias
    feed_forward  hidden = x w_1 + b_1        output = activation(hidden) w_2 + b_2

Also here: two functions that stand in the files of their mechanisms, the penalty on spans and the Sinkhorn balance.
"""

import math

import numpy as np

from refattn.definitions.compressive import Compressive
from refattn.definitions.lsh import LSH
from refattn.definitions.sinkhorn import Sinkhorn
from refattn.definitions.steps import Definition, einsum, step

__all__ = [
    "Balance",
    "CompressiveLayer",
    "FeedForward",
    "LSHLayer",
    "LayerNorm",
    "Linear",
    "OutputGate",
    "RMSNorm",
    "SpanPenalty",
    "TransformerXLLayer",
]

EPS = 1e-5


class Linear(Definition):
    """x weight + bias"""

    gradients = ("x", "weight", "bias")
    defaults = {"bias": None}

    @step
    def output(self):
        return einsum("...i,io->...o", self.x, self.weight) + (0.0 if self.bias is None else self.bias)

    @step
    def d_x(self):
        return einsum("...o,io->...i", self.cotangent("output"), self.weight)

    @step
    def d_weight(self):
        return einsum("...i,...o->io", self.x, self.cotangent("output"))

    @step
    def d_bias(self):
        return einsum("...o->o", self.cotangent("output"))


class LayerNorm(Definition):
    """Over the last axis, with the biased variance."""

    gradients = ("x", "weight", "bias")
    defaults = {"weight": None, "bias": None, "eps": EPS}

    @step
    def centred(self):
        """x - mean"""
        return self.x - mean(self.x)

    @step
    def deviation(self):
        """sqrt(var + eps)"""
        return np.sqrt(mean(self.centred * self.centred) + self.eps)

    @step
    def normal(self):
        return self.centred / self.deviation

    @step
    def output(self):
        return self.normal * (1.0 if self.weight is None else self.weight) + (0.0 if self.bias is None else self.bias)

    @step
    def d_normal(self):
        return self.cotangent("output") * (1.0 if self.weight is None else self.weight)

    @step
    def d_x(self):
        """(d - mean(d) - normal mean(d normal)) / deviation"""
        d = self.d_normal
        return (d - mean(d) - self.normal * mean(d * self.normal)) / self.deviation

    @step
    def d_weight(self):
        return einsum("...m,...m->m", self.normal, self.cotangent("output"))

    @step
    def d_bias(self):
        return einsum("...m->m", self.cotangent("output"))


def mean(x):
    """Over the last axis; 0 of nothing."""
    return x.sum(-1, keepdims=True) / max(1, x.shape[-1])


def opened(gate, activation):
    """act(gate): the logistic function, or the gate times it."""
    with np.errstate(over="ignore"):
        logistic = 1 / (1 + np.exp(-gate))
    return logistic if activation == "sigmoid" else gate * logistic


def opened_slope(gate, activation):
    """The derivative of act; (1 - sigma)(gate) = sigma(-gate)."""
    below, above = opened(gate, "sigmoid"), opened(-gate, "sigmoid")
    return below * above if activation == "sigmoid" else below + gate * below * above


class RMSNorm(Definition):
    """(weight + offset) rms(x) act(gate), or with the gate before the norm."""

    gradients = ("x", "weight", "gate")
    defaults = {
        "weight": None, "offset": 0.0, "gate": None, "gate_first": False, "activation": "silu", "groups": 1, "eps": 1e-6,
    }  # fmt: skip

    @step
    def act(self):
        """act(gate); 1 without one."""
        return np.ones(np.shape(self.x)) if self.gate is None else opened(self.gate, self.activation)

    @step
    def entering(self):
        """What is normalised."""
        return self.x * self.act if self.gate_first else self.x

    def within_groups(self, x):
        """The mean over the channels of a group, at each of them."""
        size = x.shape[-1] // self.groups
        means = [mean(x[..., i * size : (i + 1) * size]) + np.zeros(size) for i in range(self.groups)]
        return np.concatenate(means, axis=-1) if size else x

    @step
    def size(self):
        """sqrt(mean(x^2) + eps)"""
        return np.sqrt(self.within_groups(self.entering**2) + self.eps)

    @step
    def normal(self):
        return self.entering / self.size

    @step
    def factor(self):
        """weight + offset"""
        return 1.0 if self.weight is None else self.weight + self.offset

    @step
    def output(self):
        return self.normal * self.factor * (1.0 if self.gate_first else self.act)

    @step
    def d_weighted(self):
        return self.cotangent("output") * (1.0 if self.gate_first else self.act)

    @step
    def d_weight(self):
        return einsum("...m,...m->m", self.normal, self.d_weighted)

    @step
    def d_entering(self):
        """(d - normal mean(d normal)) / size"""
        d = self.d_weighted * self.factor
        return (d - self.normal * self.within_groups(d * self.normal)) / self.size

    @step
    def d_x(self):
        return self.d_entering * (self.act if self.gate_first else 1.0)

    @step
    def d_gate(self):
        d_act = self.d_entering * self.x if self.gate_first else self.cotangent("output") * self.normal * self.factor
        return d_act * opened_slope(self.gate, self.activation)


class OutputGate(Definition):
    """x act(gate)"""

    gradients = ("x", "gate")
    defaults = {"activation": "sigmoid"}

    @step
    def output(self):
        return self.x * opened(self.gate, self.activation)

    @step
    def d_x(self):
        return self.cotangent("output") * opened(self.gate, self.activation)

    @step
    def d_gate(self):
        return self.cotangent("output") * self.x * opened_slope(self.gate, self.activation)


class FeedForward(Definition):
    """activation(x w_1 + b_1) w_2 + b_2; chunks change nothing."""

    gradients = ("x", "w_1", "b_1", "w_2", "b_2")
    defaults = {"b_1": None, "b_2": None, "activation": "relu", "chunk": None}

    @step
    def hidden(self):
        return einsum("...m,mf->...f", self.x, self.w_1) + (0.0 if self.b_1 is None else self.b_1)

    @step
    def normal_below(self):
        """Phi(hidden), the normal distribution function."""
        return 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(self.hidden / math.sqrt(2)))

    @step
    def active(self):
        return self.hidden * (self.hidden > 0 if self.activation == "relu" else self.normal_below)

    @step
    def slope(self):
        if self.activation == "relu":
            return (self.hidden > 0).astype(float)
        return self.normal_below + self.hidden * np.exp(-0.5 * self.hidden**2) / math.sqrt(2 * math.pi)

    @step
    def output(self):
        return einsum("...f,fo->...o", self.active, self.w_2) + (0.0 if self.b_2 is None else self.b_2)

    @step
    def d_hidden(self):
        return einsum("...o,fo->...f", self.cotangent("output"), self.w_2) * self.slope

    @step
    def d_x(self):
        return einsum("...f,mf->...m", self.d_hidden, self.w_1)

    @step
    def d_w_1(self):
        return einsum("...m,...f->mf", self.x, self.d_hidden)

    @step
    def d_b_1(self):
        return einsum("...f->f", self.d_hidden)

    @step
    def d_w_2(self):
        return einsum("...f,...o->fo", self.active, self.cotangent("output"))

    @step
    def d_b_2(self):
        return einsum("...o->o", self.cotangent("output"))


# ------------------------------------------------------------------------------------------------ layers of the papers


class CompressiveLayer(Definition):
    """Attention over [compressed, memory, x], residual connection, layer norm before ("pre") or after ("post")."""

    gradients = ("x", "memory", "compressed", "w_q", "w_k", "w_v", "w_o", "w_r", "u", "w", "norm_weight", "norm_bias")
    defaults = {
        "memory": None, "compressed": None, "u": None, "w": None, "norm_weight": None, "norm_bias": None, "norm": "post",
        "clamp_length": None, "same_length": False, "through_memory": False, "compressed_positions": "slot", "rate": None,
        "keep_weights": False,
    }  # fmt: skip
    inner = Compressive
    parts = ("compressed", "memory", "x")

    def result_fields(self):
        return {"output": "output", **({"weights": "weights", "logits": "logits"} if self.keep_weights else {})}

    @step
    def rows(self):
        """The arrays that there are, oldest first."""
        return {n: self.argument(n) for n in self.parts if self.argument(n) is not None}

    @step
    def table(self):
        """Sinusoids of the distances, farthest first: (p, m)"""
        spans = {"compressed": 1 if self.compressed_positions == "slot" else self.rate}
        count = sum(a.shape[-2] * (spans.get(n) or 1) for n, a in self.rows.items())
        distance = np.arange(count - 1, -1, -1)
        distance = distance if self.clamp_length is None else np.minimum(distance, self.clamp_length)
        m = self.x.shape[-1]
        angles = distance[:, None] * 10000.0 ** (-2.0 * np.arange(m // 2) / m)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)

    @step
    def r(self):
        """table w_r"""
        return einsum("pm,mhd->hpd", self.table, self.w_r)

    @step
    def norms(self):
        """The norm of each array, where it comes before the attention."""
        return {n: self.normed(a) for n, a in self.rows.items()}

    def normed(self, a):
        return LayerNorm({"x": a, "weight": self.norm_weight, "bias": self.norm_bias, "eps": EPS})

    @step
    def attention(self):
        rows = {n: x.output for n, x in self.norms.items()} if self.norm == "pre" else self.rows
        weights = {n: getattr(self, n) for n in ("w_q", "w_k", "w_v", "w_o", "r", "u", "w")}
        options = {n: getattr(self, n) for n in ("same_length", "compressed_positions", "rate", "keep_weights")}
        return self.begin(self.inner, {**rows, **weights, **options, "through_memory": True})

    @step
    def sum(self):
        """x + attention"""
        return self.x + self.attention.output

    @step
    def last_norm(self):
        return self.normed(self.sum)

    @step
    def output(self):
        return self.sum if self.norm == "pre" else self.last_norm.output

    @step
    def weights(self):
        return self.attention.weights

    @step
    def logits(self):
        return self.attention.logits

    # ------------------------------------------------------------------ backward

    @step
    def d_last_norm(self):
        return self.last_norm.pull(output=self.cotangent("output"))

    @step
    def d_sum(self):
        return self.cotangent("output") if self.norm == "pre" else self.d_last_norm.gradient()["x"]

    @step
    def d_attention(self):
        return self.attention.pull(output=self.d_sum)

    @step
    def d_norms(self):
        """The norms before the attention, each with its cotangent."""
        return {n: x.pull(output=self.d_attention.gradient([n])[n]) for n, x in self.norms.items()}

    def d_rows(self, name):
        if self.norm == "pre":
            return self.d_norms[name].gradient()["x"]
        return self.d_attention.gradient([name])[name]

    @step
    def d_x(self):
        return self.d_sum + self.d_rows("x")

    @step
    def d_memory(self):
        return self.d_rows("memory") if self.through_memory else np.zeros_like(self.memory)

    @step
    def d_compressed(self):
        return self.d_rows("compressed") if self.through_memory else np.zeros_like(self.compressed)

    @step
    def d_norm_weight(self):
        norms = list(self.d_norms.values()) if self.norm == "pre" else [self.d_last_norm]
        return sum(x.d_weight for x in norms)

    @step
    def d_norm_bias(self):
        norms = list(self.d_norms.values()) if self.norm == "pre" else [self.d_last_norm]
        return sum(x.d_bias for x in norms)

    @step
    def d_w_r(self):
        return einsum("pm,...hpd->mhd", self.table, self.d_attention.d_r)

    @step
    def d_w_q(self):
        return self.d_attention.d_w_q

    @step
    def d_w_k(self):
        return self.d_attention.d_w_k

    @step
    def d_w_v(self):
        return self.d_attention.d_w_v

    @step
    def d_w_o(self):
        return self.d_attention.d_w_o

    @step
    def d_u(self):
        return self.d_attention.d_u

    @step
    def d_w(self):
        return self.d_attention.d_w


class TransformerXLLayer(CompressiveLayer):
    """The same layer with one memory."""

    parts = ("memory", "x")


class LSHLayer(Definition):
    """norm, shared projection of queries and keys, LSH attention, output projection; no residual connection."""

    gradients = ("x", "w_qk", "w_v", "w_o", "norm_weight", "norm_bias", "scale")
    results = {"output": "output", "buckets": "buckets"}
    defaults = {
        **{n: x for n, x in LSH.defaults.items() if n not in ("causal", "buckets")},
        "causal": False, "buckets": None, "norm": True, "norm_weight": None, "norm_bias": None,
    }  # fmt: skip
    inner = LSH

    @step
    def normed(self):
        return LayerNorm({"x": self.x, "weight": self.norm_weight, "bias": self.norm_bias, "eps": EPS})

    @step
    def scaled(self):
        return self.normed.output if self.norm else self.x

    @step
    def attention(self):
        qk, v = einsum("...tm,mhd->...htd", self.scaled, self.w_qk), einsum("...tm,mhe->...hte", self.scaled, self.w_v)
        own = ("x", "w_qk", "w_v", "w_o", "norm", "norm_weight", "norm_bias")
        return self.begin(self.inner, {**{n: a for n, a in self.arguments.items() if n not in own}, "qk": qk, "v": v})

    @step
    def buckets(self):
        return self.attention.result()["buckets"]

    @step
    def output(self):
        return einsum("...hte,hem->...tm", self.attention.output, self.w_o)

    # ------------------------------------------------------------------ backward

    @step
    def d_attention(self):
        return self.attention.pull(output=einsum("...tm,hem->...hte", self.cotangent("output"), self.w_o))

    @step
    def d_scaled(self):
        d = self.d_attention.gradient(["qk", "v"])
        return einsum("...htd,mhd->...tm", d["qk"], self.w_qk) + einsum("...hte,mhe->...tm", d["v"], self.w_v)

    @step
    def d_normed(self):
        return self.normed.pull(output=self.d_scaled)

    @step
    def d_x(self):
        return self.d_normed.d_x if self.norm else self.d_scaled

    @step
    def d_norm_weight(self):
        return self.d_normed.d_weight if self.norm else np.zeros_like(self.norm_weight)

    @step
    def d_norm_bias(self):
        return self.d_normed.d_bias if self.norm else np.zeros_like(self.norm_bias)

    @step
    def d_w_qk(self):
        return einsum("...tm,...htd->mhd", self.scaled, self.d_attention.gradient(["qk"])["qk"])

    @step
    def d_w_v(self):
        return einsum("...tm,...hte->mhe", self.scaled, self.d_attention.gradient(["v"])["v"])

    @step
    def d_w_o(self):
        return einsum("...hte,...tm->hem", self.attention.output, self.cotangent("output"))

    @step
    def d_scale(self):
        return self.d_attention.d_scale


# ------------------------------------------------------------------------------------------------ in mechanisms' files


class SpanPenalty(Definition):
    """coefficient mean(span)"""

    gradients = ("span",)

    @step
    def output(self):
        return np.asarray(self.coefficient * self.span.mean())

    @step
    def d_span(self):
        return np.full_like(self.span, self.cotangent("output") * self.coefficient / self.span.size)


class Balance(Sinkhorn):
    """The Sinkhorn balance alone: exp of the balanced scores."""

    gradients = ("scores",)
    defaults = {"causal": False}

    @step
    def scores(self):
        return self.argument("scores")

    @step
    def may_move(self):
        every = np.ones(self.scores.shape[-2:], dtype=bool)
        return np.tril(every, -1) if self.causal else every

    @step
    def output(self):
        return self.sorting

    @step
    def d_sorting(self):
        return self.cotangent("output")


# ------------------------------------------------------------------------------------------------ examples


def linear_example(rng, *, b=2, t=3, i=4, o=5):
    normal = rng.standard_normal
    return {"x": normal((b, t, i)), "weight": normal((i, o)), "bias": normal(o)}


def layer_norm_example(rng, *, b=2, t=3, m=6):
    normal = rng.standard_normal
    return {"x": normal((b, t, m)), "weight": normal(m), "bias": normal(m)}


def rms_norm_example(rng, *, b=2, t=3, m=6, **options):
    normal = rng.standard_normal
    return {"x": normal((b, t, m)), "weight": normal(m), "gate": normal((b, t, m)), **options}


def output_gate_example(rng, *, b=2, h=2, t=3, e=4, **options):
    return {"x": rng.standard_normal((b, h, t, e)), "gate": rng.standard_normal((b, h, t, 1)), **options}


def feed_forward_example(rng, *, b=2, t=3, m=4, f=6, activation="gelu"):
    normal = rng.standard_normal
    arrays = {"x": normal((b, t, m)), "w_1": normal((m, f)), "b_1": normal(f), "w_2": normal((f, m)), "b_2": normal(m)}
    return {**arrays, "activation": activation}


def transformer_xl_layer_example(rng, *, b=2, q=3, k=4, m=6, h=2, d=3, e=4, **options):
    normal = rng.standard_normal
    shapes: dict[str, tuple[int, ...]] = {
        "x": (b, q, m),
        "memory": (b, k, m),
        "w_q": (m, h, d),
        "w_k": (m, h, d),
        "w_v": (m, h, e),
        "w_o": (h, e, m),
    }
    shapes |= {"w_r": (m, h, d), "u": (h, d), "w": (h, d), "norm_weight": (m,), "norm_bias": (m,)}
    return {**{n: normal(shape) for n, shape in shapes.items()}, **options}


def compressive_layer_example(rng, *, b=2, q=3, k=4, n=2, m=6, h=2, d=3, e=4, **options):
    arrays = transformer_xl_layer_example(rng, b=b, q=q, k=k, m=m, h=h, d=d, e=e, **options)
    return {**arrays, "compressed": rng.standard_normal((b, n, m))}


def lsh_layer_example(rng, *, b=2, t=8, m=6, h=2, d=4, e=3, hashes=2, chunk=4, **options):
    normal = rng.standard_normal
    shapes: dict[str, tuple[int, ...]] = {"x": (b, t, m), "w_qk": (m, h, d), "w_v": (m, h, e), "w_o": (h, e, m)}
    shapes |= {"norm_weight": (m,), "norm_bias": (m,), "rotations": (d, hashes, 2)}
    return {**{n: normal(x) for n, x in shapes.items()}, "hashes": hashes, "n_buckets": 4, "chunk": chunk, **options}


def span_penalty_example(rng, *, h=3):
    return {"span": 8 * rng.random(h), "coefficient": 0.5, "max_span": 8}


def sinkhorn_example(rng, *, b=2, n=4):
    return {"scores": rng.standard_normal((b, n, n)), "iterations": 3}
