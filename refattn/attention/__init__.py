"""One file per mechanism."""

from refattn.attention.adaptive_span import adaptive_span_attention, span_penalty
from refattn.attention.bigbird import bigbird_attention
from refattn.attention.compressive import compressive_attention
from refattn.attention.delta_rule import delta_rule_attention
from refattn.attention.differential import differential_attention
from refattn.attention.efficient import efficient_attention
from refattn.attention.etc import etc_attention
from refattn.attention.forgetting import forgetting_attention
from refattn.attention.gated_linear import gated_linear_attention
from refattn.attention.linear import linear_attention
from refattn.attention.linformer import linformer_attention
from refattn.attention.local import local_attention
from refattn.attention.longformer import longformer_attention
from refattn.attention.lsh import lsh_attention
from refattn.attention.multi_head import multi_head_attention
from refattn.attention.nystrom import nystrom_attention
from refattn.attention.performer import orthogonal_features, performer_attention
from refattn.attention.routing import routing_attention
from refattn.attention.rwkv7 import rwkv7_attention
from refattn.attention.scaled_dot_product import scaled_dot_product_attention
from refattn.attention.sinkhorn import sinkhorn, sinkhorn_attention
from refattn.attention.sparse_transformer import sparse_transformer_attention
from refattn.attention.ssd import ssd_attention
from refattn.attention.synthesizer import synthesizer_attention
from refattn.attention.talking_heads import talking_heads_attention
from refattn.attention.topk import topk_attention
from refattn.attention.transformer_xl import transformer_xl_attention

__all__ = [
    "adaptive_span_attention",
    "bigbird_attention",
    "compressive_attention",
    "delta_rule_attention",
    "differential_attention",
    "efficient_attention",
    "etc_attention",
    "forgetting_attention",
    "gated_linear_attention",
    "linear_attention",
    "linformer_attention",
    "local_attention",
    "longformer_attention",
    "lsh_attention",
    "multi_head_attention",
    "nystrom_attention",
    "orthogonal_features",
    "performer_attention",
    "routing_attention",
    "rwkv7_attention",
    "scaled_dot_product_attention",
    "sinkhorn",
    "sinkhorn_attention",
    "span_penalty",
    "sparse_transformer_attention",
    "ssd_attention",
    "synthesizer_attention",
    "talking_heads_attention",
    "topk_attention",
    "transformer_xl_attention",
]
