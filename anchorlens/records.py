"""The classes of results: what functions return and `al.Record.load` reads."""

from typing import TYPE_CHECKING

from .system.package import imported_at_first_use

if TYPE_CHECKING:
    from .experiments.diagnosis import DiagnosisRecord as DiagnosisRecord
    from .experiments.generation import GenerationTrace as GenerationTrace
    from .experiments.head_effects import HeadEffectsRecord as HeadEffectsRecord
    from .experiments.label_dependence import LabelDependenceRecord as LabelDependenceRecord
    from .experiments.retrieval_heads import RetrievalHeadsRecord as RetrievalHeadsRecord
    from .experiments.step_flows import StepFlowsRecord as StepFlowsRecord
    from .experiments.task_vectors import TaskVectorsRecord as TaskVectorsRecord
    from .metrics.accuracy import AccuracyComparisonRecord as AccuracyComparisonRecord
    from .metrics.accuracy import AccuracyRecord as AccuracyRecord
    from .metrics.aucroc import AttentionAUCROCRecord as AttentionAUCROCRecord
    from .metrics.distances import AnchorDistancesRecord as AnchorDistancesRecord
    from .metrics.label_heads import LabelHeadsRecord as LabelHeadsRecord
    from .metrics.loyalties import LoyaltyRecord as LoyaltyRecord
    from .metrics.saliency_flows import SaliencyFlowsRecord as SaliencyFlowsRecord
    from .metrics.segments import SegmentAttentionRecord as SegmentAttentionRecord
    from .metrics.segments import SegmentFlowsRecord as SegmentFlowsRecord
    from .metrics.segments import SegmentRolloutRecord as SegmentRolloutRecord
    from .questions.context_comparison import ContextsRecord as ContextsRecord
    from .questions.edge_sweep import EdgeSweepRecord as EdgeSweepRecord
    from .questions.faithfulness import FaithfulnessRecord as FaithfulnessRecord
    from .questions.integrated_flows import IntegratedFlowsRecord as IntegratedFlowsRecord
    from .questions.mean_loss import LossRecord as LossRecord
    from .questions.prefix_effect import PrefixEffectRecord as PrefixEffectRecord
    from .questions.score_parts import ScorePartsRecord as ScorePartsRecord
    from .replication.models_compared import AcrossModelsRecord as AcrossModelsRecord
    from .report.answer_flows import AnswerFlows as AnswerFlows
    from .report.claims import Claim as Claim
    from .report.prompt_flows import PromptFlows as PromptFlows
    from .results.answer import Answer as Answer

__getattr__, __dir__, __all__ = imported_at_first_use(__name__, __file__)
