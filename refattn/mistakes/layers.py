"""How people get the short convolution before a recurrence wrong."""

import numpy as np

from refattn.definitions.convolution import CausalConvolution
from refattn.definitions.steps import step
from refattn.mistakes.engine import Catalogue

__all__ = ["catalogues"]

convolution = Catalogue(CausalConvolution)
catalogues = {"layers.causal_convolution": convolution}


@convolution.mistake(why="Libraries call the correlation a convolution, and a convolution turns its taps round.")
class conv_flipped(CausalConvolution):
    """the first tap meets the present in place of the last"""

    @step
    def weight(self):
        return self.argument("weight")[..., ::-1]

    @step
    def d_weight(self):
        return super().d_weight[..., ::-1]


@convolution.mistake(why="The state is cut from x alone.")
class conv_state_short(CausalConvolution):
    """in a call shorter than the state, the rows of the old state are lost"""

    @step
    def kept(self):
        """(w - 1, 1) bool: rows that come from x."""
        return (np.arange(self.taps - 1) >= self.taps - 1 - self.x.shape[-2])[:, None]

    @step
    def final_state(self):
        return np.where(self.kept, super().final_state, 0.0)


@convolution.mistake(why="What is at hand at the end of the kernel is the output.")
class conv_state_activated(CausalConvolution):
    """the state holds the last outputs in place of the last inputs"""

    @step
    def final_state(self):
        right = super().final_state
        rows = min(right.shape[-2], self.x.shape[-2])
        found = np.array(right)
        found[..., right.shape[-2] - rows :, :] = self.output[..., self.x.shape[-2] - rows :, :]
        return found


@convolution.mistake(why="Prefill never had one.")
class state_ignored(CausalConvolution):
    """the state is not used"""

    state = None

    @step
    def d_state(self):
        return np.zeros(np.shape(self.argument("state")))


@convolution.mistake(why="The bias belongs to the projection.")
class conv_bias_dropped(CausalConvolution):
    """the bias is left out"""

    bias = None

    @step
    def d_bias(self):
        return np.zeros(np.shape(self.argument("bias")))


@convolution.mistake(sides=("backward",), why="Training never used the final state, so nobody looked.")
class state_cotangent(CausalConvolution):
    """the cotangent of the new state is ignored"""

    @step
    def d_rows(self):
        right = np.array(super().d_rows)
        right[..., self.x.shape[-2] :, :] -= self.cotangent("state")
        return right
