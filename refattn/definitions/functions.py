"""Which definition and which example belong to the functions around attention, by their name in ``refattn.functions``."""

from refattn.definitions import centroids, convolution, gates, layers, memory, normalization, positions, serving

__all__ = ["definitions", "examples"]

definitions = {
    "gates.differential_lambda": gates.DifferentialLambda,
    "gates.log_decay": gates.LogDecay,
    "layers.causal_convolution": convolution.CausalConvolution,
    "layers.compressive_layer": layers.CompressiveLayer,
    "layers.feed_forward": layers.FeedForward,
    "layers.layer_norm": layers.LayerNorm,
    "layers.linear": layers.Linear,
    "layers.lsh_layer": layers.LSHLayer,
    "layers.output_gate": layers.OutputGate,
    "layers.rms_norm": layers.RMSNorm,
    "layers.transformer_xl_layer": layers.TransformerXLLayer,
    "logsumexp": normalization.LogSumExp,
    "memory.attention_reconstruction_loss": memory.ReconstructionLoss,
    "memory.auto_encoding_loss": memory.AutoEncodingLoss,
    "memory.compress": memory.Compress,
    "memory.update_compressed_memory": memory.UpdateCompressedMemory,
    "memory.update_memory": memory.UpdateMemory,
    "positions.rel_shift": positions.RelShift,
    "positions.rotary": positions.Rotary,
    "routing.update_centroids": centroids.UpdateCentroids,
    "serving.update_cache": serving.UpdateCache,
    "sinkhorn": layers.Balance,
    "softmax": normalization.Softmax,
    "span_penalty": layers.SpanPenalty,
}

examples = {
    "gates.differential_lambda": gates.differential_lambda_example,
    "gates.log_decay": gates.log_decay_example,
    "layers.causal_convolution": convolution.causal_convolution_example,
    "layers.compressive_layer": layers.compressive_layer_example,
    "layers.feed_forward": layers.feed_forward_example,
    "layers.layer_norm": layers.layer_norm_example,
    "layers.linear": layers.linear_example,
    "layers.lsh_layer": layers.lsh_layer_example,
    "layers.output_gate": layers.output_gate_example,
    "layers.rms_norm": layers.rms_norm_example,
    "layers.transformer_xl_layer": layers.transformer_xl_layer_example,
    "logsumexp": normalization.rows_example,
    "memory.attention_reconstruction_loss": memory.attention_reconstruction_loss_example,
    "memory.auto_encoding_loss": memory.auto_encoding_loss_example,
    "memory.compress": memory.compress_example,
    "memory.update_compressed_memory": memory.update_compressed_memory_example,
    "memory.update_memory": memory.update_memory_example,
    "positions.rel_shift": positions.rel_shift_example,
    "positions.rotary": positions.rotary_example,
    "routing.update_centroids": centroids.update_centroids_example,
    "serving.update_cache": serving.update_cache_example,
    "sinkhorn": layers.sinkhorn_example,
    "softmax": normalization.rows_example,
    "span_penalty": layers.span_penalty_example,
}
