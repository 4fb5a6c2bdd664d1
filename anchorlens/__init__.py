"""anchorlens: how a language model learns from the examples in its prompt.

Hooks and metrics of "Label Words are Anchors" (Wang et al., EMNLP 2023) for any TransformerLens
model.
"""

from typing import TYPE_CHECKING

from .system.package import imported_at_first_use, installed_version

# PyTorch, pandas and SciPy take seconds to import; `anchorlens --help` needs none of them.
if TYPE_CHECKING:
    from .contexts import hard_prompts as hard_prompts
    from .contexts import placement as placement
    from .contexts import selection as selection
    from .contexts.compressed import CompressedContext as CompressedContext
    from .contexts.compressed import compress as compress
    from .contexts.hard_prompt import HardPrompt as HardPrompt
    from .contexts.hard_prompt_search import train_hard_prompt as train_hard_prompt
    from .contexts.hard_prompt_transfer import HardPromptTransferRecord as HardPromptTransferRecord
    from .contexts.hard_prompt_transfer import transfer_hard_prompt as transfer_hard_prompt
    from .contexts.load import load_context as load_context
    from .contexts.peft import context_from_peft as context_from_peft
    from .contexts.peft import context_to_peft as context_to_peft
    from .contexts.prefix import PrefixContext as PrefixContext
    from .contexts.prefix import train_prefix as train_prefix
    from .contexts.protocol import Context as Context
    from .contexts.protocol import NoContext as NoContext
    from .contexts.protocol import QueryPass as QueryPass
    from .contexts.reweighted import Beta as Beta
    from .contexts.reweighted import ReweightedContext as ReweightedContext
    from .contexts.reweighted import reweight_demonstrations as reweight_demonstrations
    from .contexts.reweighted import train_reweighting as train_reweighting
    from .contexts.soft_prompt import SoftPrompt as SoftPrompt
    from .contexts.soft_prompt import train_soft_prompt as train_soft_prompt
    from .contexts.training import Trainable as Trainable
    from .contexts.training import Training as Training
    from .contexts.training import TrainingRecord as TrainingRecord
    from .contexts.training import train_context as train_context
    from .errors import AnchorlensError as AnchorlensError
    from .experiments import removal as removal
    from .experiments import sites as sites
    from .experiments import subsets as subsets
    from .experiments.analysis import analyse as analyse
    from .experiments.context_comparison import ContextsRecord as ContextsRecord
    from .experiments.context_comparison import compare_contexts as compare_contexts
    from .experiments.context_effect import plot_prefix_directions as plot_prefix_directions
    from .experiments.context_effect import plot_prefix_pattern as plot_prefix_pattern
    from .experiments.context_effect import prefix_effect as prefix_effect
    from .experiments.diagnosis import DiagnosisRecord as DiagnosisRecord
    from .experiments.diagnosis import diagnose as diagnose
    from .experiments.edge_sweep import CutEdgesRecord as CutEdgesRecord
    from .experiments.edge_sweep import edge_sweep as edge_sweep
    from .experiments.faithfulness import FaithfulnessRecord as FaithfulnessRecord
    from .experiments.faithfulness import faithfulness as faithfulness
    from .experiments.generation import GenerationTrace as GenerationTrace
    from .experiments.generation import trace_generation as trace_generation
    from .experiments.head_effects import HeadEffectsRecord as HeadEffectsRecord
    from .experiments.head_effects import head_effects as head_effects
    from .experiments.integrated_flows import IntegratedFlowsRecord as IntegratedFlowsRecord
    from .experiments.integrated_flows import integrated_flows as integrated_flows
    from .experiments.isolation import isolation_loyalty as isolation_loyalty
    from .experiments.isolation import isolation_sweep as isolation_sweep
    from .experiments.prefix_effect import PrefixEffect as PrefixEffect
    from .experiments.prefix_effect import PrefixEffectRecord as PrefixEffectRecord
    from .experiments.saliency import saliency as saliency
    from .experiments.segment_attribution import (
        SegmentAttributionRecord as SegmentAttributionRecord,
    )
    from .experiments.segment_attribution import segment_attribution as segment_attribution
    from .experiments.segment_suppression import (
        SegmentSuppressionRecord as SegmentSuppressionRecord,
    )
    from .experiments.segment_suppression import segment_suppression as segment_suppression
    from .experiments.step_flows import StepFlowsRecord as StepFlowsRecord
    from .experiments.step_flows import step_flows as step_flows
    from .experiments.task_vectors import TaskVectorsRecord as TaskVectorsRecord
    from .experiments.task_vectors import task_vectors as task_vectors
    from .hooks import Site as Site
    from .hooks import block_edges as block_edges
    from .hooks import detach_heads as detach_heads
    from .hooks import isolate_labels as isolate_labels
    from .hooks import isolate_random as isolate_random
    from .hooks import replace_heads as replace_heads
    from .hooks import reweight_anchors as reweight_anchors
    from .hooks import scale_edges as scale_edges
    from .metrics import reads as reads
    from .metrics import weights as weights
    from .metrics.accuracy import Accuracy as Accuracy
    from .metrics.accuracy import AccuracyComparisonRecord as AccuracyComparisonRecord
    from .metrics.accuracy import AccuracyRecord as AccuracyRecord
    from .metrics.accuracy import compare_accuracies as compare_accuracies
    from .metrics.aucroc import AttentionAUCROC as AttentionAUCROC
    from .metrics.aucroc import AttentionAUCROCRecord as AttentionAUCROCRecord
    from .metrics.distances import AnchorDistances as AnchorDistances
    from .metrics.distances import AnchorDistancesRecord as AnchorDistancesRecord
    from .metrics.flows import flows as flows
    from .metrics.label_heads import LabelHeads as LabelHeads
    from .metrics.label_heads import LabelHeadsRecord as LabelHeadsRecord
    from .metrics.loyalty import Loyalty as Loyalty
    from .metrics.loyalty import LoyaltyRecord as LoyaltyRecord
    from .metrics.loyalty import loyalty as loyalty
    from .metrics.metric import Metric as Metric
    from .metrics.rollout import rollout as rollout
    from .metrics.saliency_flows import SaliencyFlows as SaliencyFlows
    from .metrics.saliency_flows import SaliencyFlowsRecord as SaliencyFlowsRecord
    from .metrics.segment_attention import SegmentAttention as SegmentAttention
    from .metrics.segment_attention import SegmentAttentionRecord as SegmentAttentionRecord
    from .metrics.segment_flows import SegmentFlows as SegmentFlows
    from .metrics.segment_flows import SegmentFlowsRecord as SegmentFlowsRecord
    from .metrics.segment_rollout import SegmentRollout as SegmentRollout
    from .metrics.segment_rollout import SegmentRolloutRecord as SegmentRolloutRecord
    from .models.kv_cache import KeyValues as KeyValues
    from .models.load import load_model as load_model
    from .models.load import prepare_model as prepare_model
    from .models.load import restore_model as restore_model
    from .passes import losses as losses
    from .prompts import edges as edges
    from .prompts import relabeling as relabeling
    from .prompts.batch import PromptBatch as PromptBatch
    from .prompts.build import build_prompts as build_prompts
    from .prompts.build import build_segments as build_segments
    from .prompts.build import text_anchor_prompts as text_anchor_prompts
    from .prompts.chat import ChatTask as ChatTask
    from .prompts.edge_set import EdgeSet as EdgeSet
    from .prompts.examples import Example as Example
    from .prompts.examples import load_examples as load_examples
    from .prompts.examples import sample_demonstrations as sample_demonstrations
    from .prompts.examples import sample_queries as sample_queries
    from .prompts.relabeling import relabel as relabel
    from .prompts.sample_prompts import sample_prompts as sample_prompts
    from .prompts.task_file import read_task as read_task
    from .prompts.tasks import TASKS as TASKS
    from .prompts.tasks import Task as Task
    from .prompts.verbalizer import Verbalizer as Verbalizer
    from .replication.across_models import AcrossModelsRecord as AcrossModelsRecord
    from .replication.across_models import across_models as across_models
    from .replication.paper import paper as paper
    from .replication.paper_figures import paper_figures as paper_figures
    from .replication.paper_parts import PAPER_APPENDIX as PAPER_APPENDIX
    from .replication.paper_parts import PAPER_PARTS as PAPER_PARTS
    from .replication.paper_parts import PaperNumber as PaperNumber
    from .replication.paper_parts import PaperSetting as PaperSetting
    from .replication.paper_tables import paper_tables as paper_tables
    from .report.answer_flows import AnswerFlows as AnswerFlows
    from .report.answer_flows import plot_answer as plot_answer
    from .report.claims import Claim as Claim
    from .report.claims import claims as claims
    from .report.page import write_report as write_report
    from .report.prompt_flows import PromptFlows as PromptFlows
    from .report.prompt_flows import plot_prompt as plot_prompt
    from .results import figures as figures
    from .results import kinds as kinds
    from .results.contributions import Contributions as Contributions
    from .results.record import Record as Record
    from .results.record import load_record as load_record
    from .results.results import Results as Results
    from .runs import caches as caches
    from .runs.named import named as named
    from .runs.run import run as run
    from .runs.run import target_logits as target_logits
    from .runs.store import forget_run as forget_run
    from .runs.study import Study as Study

__version__ = installed_version("anchorlens")
__getattr__, __dir__, __all__ = imported_at_first_use(__name__, __file__)
