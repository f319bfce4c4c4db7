"""refattn: attention mechanisms written once, with hand-derived gradients, and the tool that holds other kernels against them."""

__version__ = "0.1.0"
