"""FLOP and byte counts of the layers of a multimodal LLM, from the dimensions of the model.

The rules, with their sources:

- A product of an ``[m, k]`` and a ``[k, n]`` matrix is ``m * n * k`` multiply-adds, ``2 * m * n * k``
  FLOPs (Narayanan et al. 2021, arXiv 2104.04473, appendix).
- Attention over one segment of ``L`` tokens is two such products, ``Q K^T`` and ``P V``:
  ``2 * 2 * L^2 * width`` FLOPs with ``width = num_heads * head_dim``; a causal kernel skips half
  (Dao 2023, arXiv 2307.08691, section 4.1).
- The gradients of a product with respect to its input and to its weight are one product of the same
  size each, so backward is twice forward (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
- SwiGLU has three projections, gate, up and down (Shazeer 2020, arXiv 2002.05202).

Norms, biases, activations and softmax are left out of the FLOP counts: they are bound by memory, and
per token they are proportional to terms that are counted. Counts are per layer and forward only.
"""

from dflop_ds.flops.encoders import IMAGE_CHANNELS, AudioDims, EncoderDims, NativeVisionDims, VisionDims
from dflop_ds.flops.model import (
    LlmDims,
    ModelDims,
    decoder_attention_flops,
    decoder_linear_flops,
    head_flops,
    projector_flops,
    vision_block_flops,
    vision_embed_flops,
)
from dflop_ds.flops.rules import BACKWARD_RATIO, attention_flops, copy_bytes, matmul_flops

__all__ = [
    "BACKWARD_RATIO",
    "IMAGE_CHANNELS",
    "AudioDims",
    "EncoderDims",
    "LlmDims",
    "ModelDims",
    "NativeVisionDims",
    "VisionDims",
    "attention_flops",
    "copy_bytes",
    "decoder_attention_flops",
    "decoder_linear_flops",
    "head_flops",
    "matmul_flops",
    "projector_flops",
    "vision_block_flops",
    "vision_embed_flops",
]
