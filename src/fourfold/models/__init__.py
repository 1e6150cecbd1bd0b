"""Reference models: GPT and Llama in published sizes."""

from fourfold.models.config import Config, config
from fourfold.models.sizes import SIZES
from fourfold.models.transformer import Transformer, build

__all__ = ["SIZES", "Config", "Transformer", "build", "config"]
