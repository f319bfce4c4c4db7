"""What surrounds attention in the papers, each with its gradient."""

from refattn.layers.basics import feed_forward, layer_norm, linear, residual
from refattn.layers.convolution import causal_convolution
from refattn.layers.gates import output_gate, rms_norm
from refattn.layers.recurrent import compressive_layer, transformer_xl_layer
from refattn.layers.reformer import lsh_layer
from refattn.layers.reversible import bind, chain, reversible_residual, reversible_stack

__all__ = [
    "bind",
    "causal_convolution",
    "chain",
    "compressive_layer",
    "feed_forward",
    "layer_norm",
    "linear",
    "lsh_layer",
    "output_gate",
    "residual",
    "reversible_residual",
    "reversible_stack",
    "rms_norm",
    "transformer_xl_layer",
]
