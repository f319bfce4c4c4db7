"""Gates of recurrences in steps.

softplus  -exp(a_log) softplus(z + bias)      bounded  lower_bound sigmoid(exp(a_log) (z + bias))
logsigmoid  log sigmoid(z + bias) / temperature      exp  -exp(z + bias)
"""

import numpy as np

from refattn.definitions.steps import Definition, step

__all__ = ["LogDecay", "log_decay_example"]


class LogDecay(Definition):
    """A log decay from what a layer projects."""

    gradients = ("z", "a_log", "bias")
    defaults = {"form": "softplus", "a_log": 0.0, "bias": 0.0, "lower_bound": None, "temperature": 1.0}

    @step
    def biased(self):
        """z + bias"""
        return self.z + self.bias

    @step
    def factor(self):
        """exp(a_log)"""
        return np.exp(self.a_log)

    @step
    def scaled(self):
        """exp(a_log) (z + bias), what the bounded gate takes the sigmoid of."""
        return np.where(self.biased == 0, 0.0, self.factor * self.biased)

    @step
    def output(self):
        if self.form == "softplus":
            return -self.factor * np.logaddexp(0.0, self.biased)
        if self.form == "bounded":
            return self.lower_bound * sigmoid(self.scaled)
        if self.form == "logsigmoid":
            return -np.logaddexp(0.0, -self.biased) / self.temperature
        return -np.exp(self.biased)

    @step
    def d_output(self):
        return self.cotangent("output")

    @step
    def d_scaled(self):
        """lower_bound sigma (1 - sigma) dgamma"""
        return self.lower_bound * sigmoid(self.scaled) * sigmoid(-self.scaled) * self.d_output

    @step
    def d_biased(self):
        """dgamma of each form by z + bias"""
        if self.form == "softplus":
            return -self.factor * sigmoid(self.biased) * self.d_output
        if self.form == "bounded":
            return np.where(self.d_scaled == 0, 0.0, self.factor * self.d_scaled)
        if self.form == "logsigmoid":
            return sigmoid(-self.biased) / self.temperature * self.d_output
        return self.output * self.d_output

    @step
    def d_z(self):
        return self.d_biased

    @step
    def d_bias(self):
        return self.d_biased

    @step
    def d_a_log(self):
        """gamma dgamma; bounded: s ds"""
        if self.form == "softplus":
            return self.output * self.d_output
        return (
            np.where(self.d_scaled == 0, 0.0, self.scaled * self.d_scaled) if self.form == "bounded" else 0.0 * self.z
        )


def sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))


def log_decay_example(rng, *, b=2, g=2, t=5, d=3, **options):
    """Normal z (b,g,t,d); a_log (g,1,1) in the forms that have it, bias (g,1,d)."""
    given = {"z": rng.standard_normal((b, g, t, d)), "bias": rng.standard_normal((g, 1, d)), **options}
    if options.get("form", "softplus") in ("softplus", "bounded"):
        given.setdefault("a_log", 0.5 * rng.standard_normal((g, 1, 1)))
    if options.get("form") == "bounded":
        given.setdefault("lower_bound", -5.0)
    return given


class DifferentialLambda(Definition):
    """exp(lq1.lk1) - exp(lq2.lk2) + lambda_init"""

    gradients = ("lq1", "lk1", "lq2", "lk2")

    @step
    def first(self):
        return np.exp((self.lq1 * self.lk1).sum())

    @step
    def second(self):
        return np.exp((self.lq2 * self.lk2).sum())

    @step
    def output(self):
        return self.first - self.second + self.lambda_init

    @step
    def d_lq1(self):
        return self.cotangent("output") * self.first * self.lk1

    @step
    def d_lk1(self):
        return self.cotangent("output") * self.first * self.lq1

    @step
    def d_lq2(self):
        return -self.cotangent("output") * self.second * self.lk2

    @step
    def d_lk2(self):
        return -self.cotangent("output") * self.second * self.lq2


def differential_lambda_example(rng, *, d=5):
    arrays = {n: 0.5 * rng.standard_normal(d) for n in ("lq1", "lk1", "lq2", "lk2")}
    return {**arrays, "lambda_init": 0.2}
