"""Softmax attention in steps, with every option that the softmax mechanisms share, forward and backward.

    logits = scale q.k -> score_mod -> softcap -> + bias + ALiBi -> visibility -> sinks -> softmax -> dropout -> . v

Axes: ``...`` any leading batch axes, ``h`` query head, ``g`` key head, ``q`` and ``k`` positions, ``d`` and ``e`` channels,
``n`` sinks.  Other definitions of softmax attention subclass this one (more visibility, other logits) or call it as their
``inner``, and so share its mistakes.

Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
"""

import math

import numpy as np

from refattn.definitions.steps import contract, einsum, step, sum_to_shape
from refattn.definitions.visibility import Visibility, per_batch

__all__ = ["ScaledDotProduct", "definition", "divide", "finite", "per_batch"]


class ScaledDotProduct(Visibility):
    """softmax(scale q k^T + bias, where visible) v; natural logarithm; a row without keys gives output 0 and lse -inf."""

    results = {"output": "output", "lse": "lse"}
    gradients = ("q", "k", "v", "bias", "scale", "softcap", "alibi_slopes", "sinks")
    defaults = {
        "mask": None, "pattern": None, "bias": None, "causal": False, "align": None, "window": None, "query_lengths": None,
        "key_lengths": None, "query_segments": None, "key_segments": None, "scale": None, "softcap": None,
        "softcap_after_bias": False, "alibi_slopes": None, "sinks": None, "lse_includes_sinks": True, "dropout_mask": None,
        "dropout_rate": 0.0, "score_mod": None, "keep_weights": False, "head_map": "repeat", "extra_keys": 0,
        "indices": None, "block_indices": None, "block": None, "duplicates": "union",
    }  # fmt: skip

    def result_fields(self):
        return (
            {**self.results, "weights": "used_weights", "logits": "shown_logits"} if self.keep_weights else self.results
        )

    # ------------------------------------------------------------------ logits

    @step
    def scale(self):
        given = self.argument("scale")
        return self.default_scale if given is None else np.reshape(given, ())[()]

    @step
    def default_scale(self):
        """d**-0.5"""
        return self.channels**-0.5 if self.channels else 1.0

    @step
    def products(self):
        """q.k"""
        return einsum("...hqd,...hkd->...hqk", self.q, self.keys_of_head)

    @step
    def scaled(self):
        """scale q.k"""
        return self.scale * self.products

    @step
    def modified(self):
        """score_mod(scale q.k, b, h, i, j)"""
        if self.score_mod is None:
            return self.scaled
        own, extra = np.split(self.scaled, [self.own_keys], axis=-1)
        return self.beside(np.broadcast_to(self.score_mod(own, *self.numbers), self.own_pairs), extra)

    @step
    def numbers(self):
        """b, h, i and j of every pair."""
        b = np.arange(math.prod(self.lead)).reshape(*self.lead, 1, 1, 1)
        at = (b, np.arange(self.heads)[:, None, None], self.i, self.j)
        return tuple(np.broadcast_to(n, self.own_pairs) for n in at)

    @step
    def distance(self):
        """ALiBi's |i + offset - j|"""
        return np.abs(self.ahead)

    @step
    def position_bias(self):
        """-slope |i + offset - j|"""
        return 0.0 if self.alibi_slopes is None else -self.alibi_slopes[:, None, None] * self.distance

    @step
    def added(self):
        """bias + ALiBi"""
        return self.beside((0.0 if self.bias is None else self.bias) + self.position_bias, 0.0)

    @step
    def cap(self):
        return None if self.softcap is None else np.reshape(self.softcap, ())[()]

    @step
    def capped_input(self):
        """What the cap acts on."""
        return self.modified + self.added if self.softcap_after_bias else self.modified

    @step
    def capped(self):
        """cap tanh(x / cap)"""
        return self.capped_input if self.cap is None else self.cap * np.tanh(self.capped_input / self.cap)

    @step
    def hidden(self):
        """Pairs hidden by -inf from score_mod or bias, before any cap."""
        hidden = np.zeros(self.pairs, dtype=bool)
        if self.score_mod is not None:
            hidden = hidden | np.isneginf(self.modified.real)
        return hidden if self.bias is None else hidden | self.beside(np.isneginf(self.bias.real), False)

    @step
    def logits(self):
        """What meets visibility."""
        logits = self.capped if self.softcap_after_bias else self.capped + self.added
        return np.broadcast_to(logits + self.repeats, self.pairs)

    @step
    def repeats(self):
        """ln of how often a listed key counts."""
        if self.listed_keys is None or self.duplicates == "union":
            return 0.0
        return self.beside(np.log(np.maximum(self.times_listed, 1)), 0.0)

    @step
    def shown_logits(self):
        """The result ``logits``: as they meet visibility; -inf where bias or score_mod hide the pair, and in padding."""
        padded = self.beside(
            ~(self.visible_by_query_lengths & self.visible_by_key_lengths), ~self.visible_by_query_lengths
        )
        return np.where(self.hidden | padded, -np.inf, self.logits)

    @step
    def seen(self):
        """Visible, and not hidden by -inf."""
        return self.visible & ~self.hidden

    @step
    def masked_logits(self):
        """Logits where seen, -inf elsewhere."""
        return np.where(self.seen, self.logits, -np.inf)

    # ------------------------------------------------------------------ softmax

    @step
    def real_rows(self):
        """Rows that are no padding, (..., 1, q, 1)."""
        return np.broadcast_to(self.visible_by_query_lengths, (*self.pairs[:-1], 1))

    @step
    def sink_logits(self):
        """(h, 1, n)"""
        if self.sinks is None:
            return np.zeros((self.heads, 1, 0))
        return np.reshape(self.sinks, (self.heads, 1, *(np.shape(self.sinks)[1:] or (1,))))

    @step
    def largest(self):
        """Largest logit of a row, sinks included; -inf where there is none."""
        top = self.masked_logits.real.max(-1, keepdims=True, initial=-np.inf)
        return np.maximum(top, self.sink_logits.real.max(-1, keepdims=True, initial=-np.inf))

    @step
    def maximum(self):
        """What is subtracted before exp: the largest logit, 0 in a row without any."""
        return np.where(np.isneginf(self.largest), 0.0, self.largest)

    @step
    def exponential(self):
        return np.exp

    @step
    def exponentials(self):
        """exp(logits - maximum)"""
        return self.exponential(self.masked_logits - self.maximum)

    @step
    def sink_exponentials(self):
        """exp(sinks - maximum), (..., h, q, n)"""
        return self.exponential(self.sink_logits - self.maximum)

    @step
    def key_sum(self):
        """Sum of the exponentials of a row."""
        return self.exponentials.sum(-1, keepdims=True)

    @step
    def row_sum(self):
        """Sum of the exponentials of a row, sinks included."""
        return self.key_sum + self.sink_exponentials.sum(-1, keepdims=True)

    @step
    def weights(self):
        """exp(logits - maximum) / row_sum"""
        return np.where(self.real_rows, divide(self.exponentials, self.row_sum), 0.0)

    @step
    def dropout(self):
        """Factors of the weights: keep / (1 - rate)"""
        if self.dropout_mask is None:
            return np.ones(self.pairs)
        keep = self.dropout_mask
        if np.shape(keep)[-1] != self.keys:  # it is about the keys that have a position
            keep = self.beside(keep, True)
        return np.broadcast_to(keep, self.pairs) / (1 - self.dropout_rate)

    @step
    def used_weights(self):
        """weights after dropout"""
        return self.weights * self.dropout

    @step
    def output(self):
        """weights . v"""
        seen = self.seen | (self.weights != 0)
        return contract("...hqk,...hke->...hqe", self.used_weights, self.values_of_head, seen)

    @step
    def log_row_sum(self):
        """The lse with the sinks: what a backward rebuilds the weights from."""
        return np.where(self.real_rows, self.maximum + np.log(self.row_sum), -np.inf)[..., 0]

    @step
    def lse(self):
        """maximum + ln(row_sum)"""
        if self.lse_includes_sinks:
            return self.log_row_sum
        return np.where(self.real_rows, self.key_maximum + np.log(self.lone_key_sum), -np.inf)[..., 0]

    @step
    def key_maximum(self):
        """Largest logit of a row without its sinks, beside which the keys may vanish."""
        if self.sinks is None:
            return self.maximum
        top = self.masked_logits.real.max(-1, keepdims=True, initial=-np.inf)
        return np.where(np.isneginf(top), 0.0, top)

    @step
    def lone_exponentials(self):
        """exp(logits - key_maximum)"""
        return self.exponentials if self.sinks is None else self.exponential(self.masked_logits - self.key_maximum)

    @step
    def lone_key_sum(self):
        return self.key_sum if self.sinks is None else self.lone_exponentials.sum(-1, keepdims=True)

    # ------------------------------------------------------------------ backward

    @step
    def d_output(self):
        return self.cotangent("output")

    @step
    def d_lse(self):
        return self.cotangent("lse")

    @step
    def saved_lse(self):
        """The lse, sinks included, that the backward has."""
        if self.lse_includes_sinks:
            return self.lse
        return np.logaddexp(self.lse, np.logaddexp.reduce(self.sink_logits[:, 0], axis=-1, initial=-np.inf)[:, None])

    @step
    def rebuilt_weights(self):
        """The weights as the backward has them; exp(logits - lse) where an lse is handed over."""
        if not self.is_handed("lse"):
            return self.weights
        return np.where(self.real_rows, self.exponential(self.masked_logits - finite(self.saved_lse)), 0.0)

    @step
    def touched(self):
        """Pairs that the backward may touch."""
        return self.seen | np.isnan(self.rebuilt_weights)

    @step
    def rebuilt_dropout(self):
        return self.dropout

    @step
    def d_used_weights(self):
        """dO . v"""
        return np.where(self.touched, einsum("...hqe,...hke->...hqk", self.d_output, self.values_of_head), 0.0)

    @step
    def d_weights(self):
        """dP through the dropout"""
        return self.rebuilt_dropout * self.d_used_weights

    @step
    def delta(self):
        """The row term dO . output of the softmax's derivative."""
        return np.where(self.real_rows, (self.d_output * self.output).sum(-1, keepdims=True), 0.0)

    @step
    def lse_share(self):
        """d lse / d logits"""
        if self.lse_includes_sinks:
            return self.rebuilt_weights
        if self.is_handed("lse"):
            share = self.exponential(self.masked_logits - finite(self.lse))
        else:
            share = divide(self.lone_exponentials, self.lone_key_sum)
        return np.where(self.real_rows, share, 0.0)

    @step
    def d_softmax(self):
        """P (dP - delta)"""
        return self.rebuilt_weights * (self.d_weights - self.delta)

    @step
    def d_logits(self):
        """P (dP - delta) + P d_lse"""
        shared = np.where(self.lse_share == 0, 0.0, self.lse_share * self.d_lse[..., None])
        return np.where(self.touched, self.d_softmax + shared, 0.0)

    @step
    def cap_slope(self):
        """1 - tanh(x / cap)^2"""
        return 1.0 if self.cap is None else 1 - np.tanh(self.capped_input / self.cap) ** 2

    @step
    def d_capped_input(self):
        return np.where(self.touched, self.d_logits * self.cap_slope, 0.0)

    @step
    def d_added(self):
        return self.d_capped_input if self.softcap_after_bias else self.d_logits

    @step
    def d_own_added(self):
        """The cotangent of bias + ALiBi."""
        return np.broadcast_to(self.d_added, self.pairs)[..., : self.own_keys]

    @step
    def d_scaled(self):
        """The cotangent of scale q.k, through score_mod."""
        if self.score_mod is None:
            return self.d_capped_input
        slope = getattr(self.score_mod, "derivative", None)
        if slope is None:
            slope = lambda x, *at: np.imag(self.score_mod(x + 1e-30j, *at)) / 1e-30  # noqa: E731
        slopes = self.beside(slope(self.scaled[..., : self.own_keys], *self.numbers), 1.0)
        return np.where(self.touched, self.d_capped_input * slopes, 0.0)

    @step
    def scale_of_gradients(self):
        """The scale in dQ and dK."""
        return self.scale

    @step
    def d_products(self):
        return self.scale_of_gradients * self.d_scaled

    @step
    def d_q(self):
        """scale dS . k"""
        return contract("...hqk,...hkd->...hqd", self.d_products, self.keys_of_head, self.touched)

    @step
    def d_keys_of_head(self):
        """scale dS^T . q, for every query head"""
        return contract("...hqk,...hqd->...hkd", self.d_products, self.q, self.touched)

    @step
    def d_values_of_head(self):
        """P^T . dO, for every query head"""
        used = self.rebuilt_weights * self.rebuilt_dropout
        return contract("...hqk,...hqe->...hke", used, self.d_output, self.touched)

    @step
    def query_heads_summed(self):
        """(g, h) ones where key head g serves query head h."""
        return (np.arange(self.key_heads)[:, None] == self.key_head).astype(float)

    @step
    def d_k(self):
        """The sum over the query heads of a key head."""
        return contract("gh,...hkd->...gkd", self.query_heads_summed, self.d_keys_of_head, self.query_heads_summed != 0)

    @step
    def d_v(self):
        """The sum over the query heads of a key head."""
        return contract(
            "gh,...hke->...gke", self.query_heads_summed, self.d_values_of_head, self.query_heads_summed != 0
        )

    @step
    def d_bias(self):
        return sum_to_shape(self.d_own_added, np.shape(self.argument("bias")))

    @step
    def d_scale(self):
        """Sum of dS q.k"""
        return np.where(self.touched, self.d_scaled * self.products, 0.0).sum()

    @step
    def slope_by_cap(self):
        """d capped / d cap = tanh(x) - x (1 - tanh(x)^2), x = input / cap"""
        x = self.capped_input / self.cap
        return np.tanh(x) - x * (1 - np.tanh(x) ** 2)

    @step
    def d_softcap(self):
        """Sum of dS d capped / d cap"""
        return np.where(self.touched, self.d_logits * self.slope_by_cap, 0.0).sum()

    @step
    def d_alibi_slopes(self):
        """-sum of dS |i + offset - j|"""
        return -np.moveaxis(self.d_own_added * self.distance, -3, -1).sum(axis=tuple(range(len(self.pairs) - 1)))

    @step
    def sink_weights(self):
        """exp(sink - lse), (..., h, q, n)"""
        if self.is_handed("lse"):
            weights = self.exponential(self.sink_logits - finite(self.saved_lse))
        else:
            weights = divide(self.sink_exponentials, self.row_sum)
        return np.where(self.real_rows, weights, 0.0)

    @step
    def d_sink_logits(self):
        """w_sink (d_lse - delta)"""
        d_lse = self.d_lse[..., None] if self.lse_includes_sinks else 0.0
        return np.where(self.sink_weights == 0, 0.0, self.sink_weights * (d_lse - self.delta))

    @step
    def d_sinks(self):
        by_head = self.d_sink_logits.sum(axis=(*range(len(self.lead)), -2))
        return np.reshape(by_head, np.shape(self.argument("sinks")))


def divide(exponentials: np.ndarray, row_sum: np.ndarray) -> np.ndarray:
    """exponentials / row_sum, and 0 in rows without any mass."""
    return np.where(row_sum == 0, 0.0, exponentials / np.where(row_sum == 0, 1.0, row_sum))


def finite(lse: np.ndarray) -> np.ndarray:
    """(..., h, q, 1), 0 in rows without any key: what is subtracted from logits that are all -inf there."""
    return np.where(np.isneginf(lse.real), 0.0, lse)[..., None]


definition = ScaledDotProduct
