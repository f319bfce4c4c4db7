"""Time and peak memory of routing_attention at sqrt(length) clusters, and time of causal linear_attention, by length."""

import math

import numpy as np

import refattn as ra

HEADS, CHANNELS = 8, 64


class Routing:
    params = [1024, 4096]
    param_names = ["length"]

    def setup(self, length):
        rng = np.random.default_rng(0)
        q, v, self.d_output = (rng.standard_normal((1, HEADS, length, CHANNELS)).astype("float32") for _ in range(3))
        centroids = ra.routing.initial_centroids(rng, h=HEADS, c=math.isqrt(length), d=CHANNELS).astype("float32")
        self.given = {"q": q, "v": v, "centroids": centroids, "causal": True}

    def time_forward(self, length):
        ra.routing_attention(**self.given)

    def time_forward_and_backward(self, length):
        _, pullback = ra.routing_attention.vjp(**self.given)
        pullback(self.d_output)

    def peakmem_forward_and_backward(self, length):
        _, pullback = ra.routing_attention.vjp(**self.given)
        pullback(self.d_output)


class Linear:
    params = [1024, 4096]
    param_names = ["length"]

    def setup(self, length):
        rng = np.random.default_rng(0)
        self.q, self.k, self.v, self.d_output = (
            rng.standard_normal((1, HEADS, length, CHANNELS)).astype("float32") for _ in range(4)
        )

    def time_chunked_forward_and_backward(self, length):
        _, pullback = ra.linear_attention.vjp(self.q, self.k, self.v, causal=True, form="chunked")
        pullback(self.d_output)
