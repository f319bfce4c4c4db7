"""One file per mechanism."""

from refattn.attention.scaled_dot_product import scaled_dot_product_attention

__all__ = ["scaled_dot_product_attention"]
