"""ringflash: exact attention over sequences cut across GPUs."""

from ringflash.attention import attention
from ringflash.kernels.backend import Score
from ringflash.module import RingAttention
from ringflash.ring import Ring
from ringflash.schedule.layout import Contiguous, Layout, Striped, Zigzag
from ringflash.schedule.mask import Causal, Documents, Full, Mask, Window
from ringflash.schedule.plan import Plan, plan

__version__ = "0.1.0"

__all__ = [
    "Causal",
    "Contiguous",
    "Documents",
    "Full",
    "Layout",
    "Mask",
    "Plan",
    "Ring",
    "RingAttention",
    "Score",
    "Striped",
    "Window",
    "Zigzag",
    "attention",
    "plan",
]
