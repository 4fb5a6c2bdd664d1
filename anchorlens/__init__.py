"""anchorlens: how a language model learns from the examples in its prompt.

Hooks and metrics of "Label Words are Anchors" (Wang et al., EMNLP 2023) for any TransformerLens
model.
"""

from . import edges as edges
from . import figures as figures
from .batch import PromptBatch as PromptBatch
from .errors import AnchorlensError as AnchorlensError
from .experiments.compression import compress as compress
from .experiments.compression_loyalty import AnswerTimesRecord as AnswerTimesRecord
from .experiments.compression_loyalty import CompressionRecord as CompressionRecord
from .experiments.compression_loyalty import answer_times as answer_times
from .experiments.compression_loyalty import compression_loyalty as compression_loyalty
from .experiments.context import CompressedContext as CompressedContext
from .experiments.diagnosis import DiagnosisRecord as DiagnosisRecord
from .experiments.diagnosis import diagnose as diagnose
from .experiments.isolation import IsolationRecord as IsolationRecord
from .experiments.isolation import isolation_loyalty as isolation_loyalty
from .experiments.isolation import plot_isolation as plot_isolation
from .experiments.kept import anchors_and_format as anchors_and_format
from .experiments.kept import as_in_prompt as as_in_prompt
from .experiments.kept import everything as everything
from .experiments.kept import label_words as label_words
from .experiments.kept import random_and_format as random_and_format
from .experiments.kept import rebased as rebased
from .experiments.kept import restarted as restarted
from .experiments.reweighting import Beta as Beta
from .experiments.reweighting import reweighting_accuracy as reweighting_accuracy
from .experiments.reweighting import train_reweighting as train_reweighting
from .forward import label_cross_entropy as label_cross_entropy
from .hooks import block_edges as block_edges
from .hooks import isolate as isolate
from .hooks import isolate_labels as isolate_labels
from .hooks import isolate_random as isolate_random
from .hooks import reweight_anchors as reweight_anchors
from .metrics.accuracy import Accuracy as Accuracy
from .metrics.accuracy import AccuracyComparisonRecord as AccuracyComparisonRecord
from .metrics.accuracy import AccuracyRecord as AccuracyRecord
from .metrics.accuracy import compare_accuracies as compare_accuracies
from .metrics.aucroc import AttentionAUCROC as AttentionAUCROC
from .metrics.aucroc import AttentionAUCROCRecord as AttentionAUCROCRecord
from .metrics.distances import AnchorDistances as AnchorDistances
from .metrics.distances import AnchorDistancesRecord as AnchorDistancesRecord
from .metrics.loyalty import Loyalty as Loyalty
from .metrics.loyalty import LoyaltyRecord as LoyaltyRecord
from .metrics.loyalty import loyalty as loyalty
from .metrics.metric import Metric as Metric
from .metrics.metric import Observation as Observation
from .metrics.saliency import SaliencyFlows as SaliencyFlows
from .metrics.saliency import SaliencyFlowsRecord as SaliencyFlowsRecord
from .metrics.saliency import saliency as saliency
from .models import load_model as load_model
from .models import prepare_model as prepare_model
from .models import restore_model as restore_model
from .prompts import build_prompts as build_prompts
from .report import write_report as write_report
from .results import Record as Record
from .run import run as run
from .run import target_logits as target_logits
from .tasks import TASKS as TASKS
from .tasks import Example as Example
from .tasks import Task as Task
from .tasks import load_examples as load_examples
from .tasks import sample_demonstrations as sample_demonstrations
