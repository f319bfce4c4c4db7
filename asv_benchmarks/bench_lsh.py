"""Time and peak memory of lsh_attention by length."""

import numpy as np

import refattn as ra

HEADS, CHANNELS, ROUNDS = 8, 64, 4


def draw(length: int) -> tuple[dict, np.ndarray]:
    """Arguments and a cotangent of the output."""
    rng = np.random.default_rng(0)
    qk, v, d_output = (rng.standard_normal((1, HEADS, length, CHANNELS)).astype("float32") for _ in range(3))
    rotations = rng.standard_normal((CHANNELS, ROUNDS, 16)).astype("float32")
    return {"qk": qk, "v": v, "rotations": rotations, "n_buckets": (16, 16), "causal": True}, d_output


class Time:
    params = [1024, 4096]
    param_names = ["length"]

    def setup(self, length):
        self.given, self.d_output = draw(length)

    def time_forward(self, length):
        ra.lsh_attention(**self.given)

    def time_forward_and_backward(self, length):
        _, pullback = ra.lsh_attention.vjp(**self.given)
        pullback(self.d_output)

    def peakmem_forward_and_backward(self, length):
        _, pullback = ra.lsh_attention.vjp(**self.given)
        pullback(self.d_output)
