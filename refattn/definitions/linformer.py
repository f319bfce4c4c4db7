"""Linformer in steps: keys and values projected along the positions, then softmax attention over the projected rows.

    keys = e_k^T . k      values = e_v^T . v      output = softmax(scale q keys^T) values

Axes: ``...`` any leading batch axes, ``h`` head, ``q`` and ``k`` positions, ``n`` projected row, ``d`` and ``e`` channels.

Source: Wang, Li, Khabsa, Fang, Ma 2020, arXiv:2006.04768, section 4, equation 7.
"""

from refattn.definitions.scaled_dot_product import ScaledDotProduct
from refattn.definitions.steps import Definition, einsum, step

__all__ = ["Linformer", "definition"]


class Linformer(Definition):
    """Softmax attention over mixtures of keys and values; all heads share the projections."""

    gradients = ("q", "k", "v", "e_k", "e_v", "scale")
    defaults = {"scale": None}
    inner = ScaledDotProduct

    @step
    def keys(self):
        """e_k^T . k"""
        return einsum("kn,...kd->...nd", self.key_projection, self.k)

    @step
    def values(self):
        """e_v^T . v"""
        return einsum("kn,...ke->...ne", self.value_projection, self.v)

    @step
    def key_projection(self):
        return self.e_k

    @step
    def value_projection(self):
        return self.e_v

    @step
    def attention(self):
        """softmax(scale q keys^T) values"""
        return self.begin(self.inner, {"q": self.q, "k": self.keys, "v": self.values, "scale": self.scale})

    @step
    def output(self):
        return self.attention.output

    # ------------------------------------------------------------------ backward

    @step
    def d_attention(self):
        """The attention with the cotangent of its output."""
        return self.attention.pull(output=self.cotangent("output"))

    @step
    def d_q(self):
        return self.d_attention.d_q

    @step
    def d_keys(self):
        return self.d_attention.d_k

    @step
    def d_values(self):
        return self.d_attention.d_v

    @step
    def d_k(self):
        """e_k . d_keys"""
        return einsum("kn,...nd->...kd", self.key_projection, self.d_keys)

    @step
    def d_v(self):
        """e_v . d_values"""
        return einsum("kn,...ne->...ke", self.value_projection, self.d_values)

    @step
    def d_e_k(self):
        """k . d_keys^T, over batch and heads"""
        return einsum("...hkd,...hnd->kn", self.k, self.d_keys)

    @step
    def d_e_v(self):
        """v . d_values^T, over batch and heads"""
        return einsum("...hke,...hne->kn", self.v, self.d_values)

    @step
    def d_scale(self):
        return self.d_attention.d_scale


definition = Linformer
