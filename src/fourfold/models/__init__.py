"""Reference models: GPT and Llama in published sizes."""

from fourfold.models.config import ModelConfig, config
from fourfold.models.sizes import SIZES
from fourfold.models.transformer import Transformer, build

__all__ = ["SIZES", "ModelConfig", "Transformer", "build", "config"]
