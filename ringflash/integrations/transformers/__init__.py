"""Hugging Face transformers: register(), and models with attn_implementation="ring" attend over a ring.

docs/huggingface.md has the quickstart, what is refused, and how the Trainer counts tokens.
"""

from ringflash.integrations.transformers.inputs import local_inputs
from ringflash.integrations.transformers.proof import check_model
from ringflash.integrations.transformers.register import register
from ringflash.integrations.transformers.trainer import RingTraining

__all__ = ["RingTraining", "check_model", "local_inputs", "register"]
