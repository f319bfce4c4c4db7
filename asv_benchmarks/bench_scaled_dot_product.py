"""Time, peak memory and error of scaled_dot_product_attention, by length and dtype."""

import numpy as np

import refattn as ra

HEADS, CHANNELS = 8, 64


def draw(length: int, dtype: str, heads: int = HEADS) -> list[np.ndarray]:
    """q, k, v and a cotangent of the output, each (1, heads, length, 64)."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, heads, length, CHANNELS)).astype(dtype) for _ in range(4)]


class Time:
    params = ([512, 1024, 2048], ["float32", "float64"])
    param_names = ["length", "dtype"]

    def setup(self, length, dtype):
        self.q, self.k, self.v, self.d_output = draw(length, dtype)

    def time_forward(self, length, dtype):
        ra.scaled_dot_product_attention(self.q, self.k, self.v)

    def time_forward_causal(self, length, dtype):
        ra.scaled_dot_product_attention(self.q, self.k, self.v, causal=True)

    def time_forward_and_backward(self, length, dtype):
        _, pullback = ra.scaled_dot_product_attention.vjp(self.q, self.k, self.v)
        pullback(self.d_output)


class PeakMemory:
    """Peak resident memory of the process with its imports and inputs; it must grow linearly with the length."""

    params = ([1024, 4096, 8192], ["float32", "float64"])
    param_names = ["length", "dtype"]

    def setup(self, length, dtype):
        self.q, self.k, self.v, self.d_output = draw(length, dtype, heads=2)

    def peakmem_forward(self, length, dtype):
        ra.scaled_dot_product_attention(self.q, self.k, self.v, algorithm="tiled")

    def peakmem_forward_and_backward(self, length, dtype):
        _, pullback = ra.scaled_dot_product_attention.vjp(self.q, self.k, self.v, algorithm="tiled")
        pullback(self.d_output)


class Error:
    """Largest error over the largest element, in unit roundoffs of the dtype; truth: float64 on the rounded inputs."""

    params = ([64, 1024], ["float16", "bfloat16", "float32"], ["whole", "tiled"])
    param_names = ["length", "dtype", "algorithm"]
    unit = "unit roundoffs"

    def setup(self, length, dtype, algorithm):
        if dtype == "bfloat16":
            import ml_dtypes

            dtype = ml_dtypes.bfloat16
        self.roundoff = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[np.dtype(dtype).name]
        self.arrays = draw(length, dtype, heads=2)
        self.exact = [x.astype(np.float64) for x in self.arrays]

    def largest(self, found, true):
        return float(np.max(np.abs(found.astype(np.float64) - true)) / np.max(np.abs(true)) / self.roundoff)

    def track_output(self, length, dtype, algorithm):
        found = ra.scaled_dot_product_attention(*self.arrays[:3], algorithm=algorithm)
        return self.largest(found, ra.scaled_dot_product_attention(*self.exact[:3], algorithm="whole"))

    def track_gradients(self, length, dtype, algorithm):
        _, pullback = ra.scaled_dot_product_attention.vjp(*self.arrays[:3], algorithm=algorithm)
        _, exact_pullback = ra.scaled_dot_product_attention.vjp(*self.exact[:3], algorithm="whole")
        found, true = pullback(self.arrays[3]), exact_pullback(self.exact[3])
        return max(self.largest(found[name], true[name]) for name in true)
