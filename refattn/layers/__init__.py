"""What surrounds attention in the papers, each with its gradient."""

from refattn.layers.basics import feed_forward, layer_norm, linear, residual
from refattn.layers.recurrent import compressive_layer, transformer_xl_layer

__all__ = ["compressive_layer", "feed_forward", "layer_norm", "linear", "residual", "transformer_xl_layer"]
