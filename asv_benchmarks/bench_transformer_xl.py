"""Transformer-XL attention: time and peak memory by length, the price of the positions, and a stream of segments."""

import numpy as np

import refattn as ra

HEADS, CHANNELS = 8, 64


class Time:
    """A segment with a memory of the same length; beside it the same attention without positions."""

    params = ([512, 1024, 2048], ["float32", "float64"])
    param_names = ["segment", "dtype"]

    def setup(self, segment, dtype):
        drawn = ra.transformer_xl_attention.example(
            np.random.default_rng(0), b=1, h=HEADS, q=segment, k=2 * segment, d=CHANNELS, e=CHANNELS
        )
        self.arguments = {n: x.astype(dtype) for n, x in drawn.items()}
        self.d_output = self.arguments["q"].copy()
        self.plain = {n: self.arguments[n] for n in ("q", "k", "v")}

    def time_forward(self, segment, dtype):
        ra.transformer_xl_attention(**self.arguments)

    def time_forward_and_backward(self, segment, dtype):
        _, pullback = ra.transformer_xl_attention.vjp(**self.arguments)
        pullback(self.d_output)

    def time_forward_without_positions(self, segment, dtype):
        ra.scaled_dot_product_attention(**self.plain, causal=True, align="lower_right")


class PeakMemory:
    """It must grow linearly with the length."""

    params = [1024, 4096, 8192]
    param_names = ["segment"]

    def setup(self, segment):
        drawn = ra.transformer_xl_attention.example(
            np.random.default_rng(0), b=1, h=2, q=segment, k=2 * segment, d=CHANNELS, e=CHANNELS
        )
        self.arguments = {n: x.astype("float32") for n, x in drawn.items()}

    def peakmem_forward_and_backward(self, segment):
        result, pullback = ra.transformer_xl_attention.vjp(**self.arguments)
        pullback(result.output)


class Stream:
    """A sequence of 4096 tokens through four layers, by segment length, with gradients and with both memories."""

    params = ([64, 256, 1024], ["memory", "compressed"])
    param_names = ["segment", "kind"]

    def setup(self, segment, kind):
        rng, m, h, d = np.random.default_rng(0), 128, 4, 32
        shapes = {"w_q": (m, h, d), "w_k": (m, h, d), "w_v": (m, h, d), "w_o": (h, d, m), "w_r": (m, h, d)}
        function = ra.layers.transformer_xl_layer if kind == "memory" else ra.layers.compressive_layer
        self.layers = [
            (function, {n: (m**-0.5 * rng.standard_normal(s)).astype("float32") for n, s in shapes.items()})
            for _ in range(4)
        ]
        x = rng.standard_normal((4096, m)).astype("float32")
        self.segments = np.split(x, 4096 // segment)
        self.options = {"memory_length": 512}
        if kind == "compressed":
            self.options.update(memory_length=256, compressed_length=256, rate=2)

    def time_forward(self, segment, kind):
        for _ in ra.memory.stream(self.segments, self.layers, **self.options):
            pass

    def time_forward_and_backward(self, segment, kind):
        for step in ra.memory.stream(self.segments, self.layers, **self.options):
            step.pullback(step.output)
