"""Contexts: what can stand before a query, and from what the query is answered."""

from typing import TYPE_CHECKING

from ..system.package import imported_at_first_use

if TYPE_CHECKING:
    from ..models.kv_cache import KeyValues as KeyValues
    from . import hard_prompts as hard_prompts
    from . import placement as placement
    from . import selection as selection
    from .compressed import CompressedContext as CompressedContext
    from .hard_prompt import HardPrompt as HardPrompt
    from .peft import context_from_peft as context_from_peft
    from .peft import context_to_peft as context_to_peft
    from .prefix import PrefixContext as PrefixContext
    from .protocol import Context as Context
    from .protocol import NoContext as NoContext
    from .protocol import QueryPass as QueryPass
    from .reweighted import Beta as Beta
    from .reweighted import ReweightedContext as ReweightedContext
    from .reweighted import reweight_demonstrations as reweight_demonstrations
    from .reweighted import train_reweighting as train_reweighting
    from .soft_prompt import SoftPrompt as SoftPrompt
    from .stored import StoredContext as StoredContext
    from .training import Trainable as Trainable
    from .training import Training as Training
    from .training import TrainingRecord as TrainingRecord
    from .training import train_context as train_context

__getattr__, __dir__, __all__ = imported_at_first_use(__name__, __file__)
