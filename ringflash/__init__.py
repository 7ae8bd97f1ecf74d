"""ringflash: exact attention over sequences cut across GPUs."""

from ringflash.attention import attention
from ringflash.kernels.score import Score
from ringflash.kernels.table import KernelTable
from ringflash.module import RingAttention
from ringflash.ring import Ring
from ringflash.schedule.documents import Documents, Padding
from ringflash.schedule.layout import Balanced, Contiguous, DocumentZigzag, Layout, Striped, Zigzag
from ringflash.schedule.mask import Causal, Chunked, FirstKeys, Full, Mask, Prefix, Union, Window
from ringflash.schedule.plan import Plan, plan
from ringflash.sdpa import scaled_dot_product_attention

__version__ = "0.1.0"

__all__ = [
    "Balanced",
    "Causal",
    "Chunked",
    "Contiguous",
    "DocumentZigzag",
    "Documents",
    "FirstKeys",
    "Full",
    "KernelTable",
    "Layout",
    "Mask",
    "Padding",
    "Plan",
    "Prefix",
    "Ring",
    "RingAttention",
    "Score",
    "Striped",
    "Union",
    "Window",
    "Zigzag",
    "attention",
    "plan",
    "scaled_dot_product_attention",
]
